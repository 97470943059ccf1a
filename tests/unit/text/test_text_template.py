"""The official templates: every rendering of the shared cases, text, errors and ids."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import weakref
from typing import Any

import jinja2
import pytest

from kslserve.errors import ModelFileError
from kslserve.text.marks import CONTROL_TOKENS
from kslserve.text.rendered import Rendered
from kslserve.text.template import ChatTemplate, bundled
from tests.unit.text.text_support import DATA, nano, qwen

CASES: dict[str, Any] = json.loads((DATA / "templates" / "cases.json").read_bytes())
INPUTS: dict[str, Any] = CASES["_inputs"]
GENERATIONS = {"3.5": "qwen3.5-4b", "3.6": "qwen3.6-27b", "3.8": "qwen3.8-27b"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TEMPLATES = {version: ChatTemplate(bundled(version)) for version in GENERATIONS}


@pytest.mark.parametrize("version", GENERATIONS)
@pytest.mark.parametrize("case", INPUTS)
def test_rendering_is_the_official_one(version: str, case: str) -> None:
    want = CASES[GENERATIONS[version]][case]
    variables = {"add_generation_prompt": True, **INPUTS[case]}
    if "error" not in want:
        assert TEMPLATES[version].render(**variables) == want["text"]
        return
    kind, _, message = want["error"].partition(": ")
    with pytest.raises((jinja2.TemplateError, TypeError)) as caught:
        TEMPLATES[version].render(**variables)
    assert type(caught.value).__name__ == kind
    assert str(caught.value) == message


def test_ids_are_the_official_ones() -> None:
    cases = [
        case for name in GENERATIONS.values() for case in CASES[name].values() if "ids" in case
    ]
    assert len(cases) > 80
    tokenizer, _ = qwen(case["text"] for case in cases)
    for case in cases:
        assert tokenizer.encode(case["text"]).tolist() == case["ids"]
        assert tokenizer.encode_rendered(Rendered(case["text"], False)).tolist() == case["ids"]


@pytest.mark.parametrize("version", GENERATIONS)
def test_version_is_read_from_the_text(version: str) -> None:
    assert TEMPLATES[version].version == version
    assert ChatTemplate("{{ messages }}").version == "3.5"


def test_digests_are_those_of_the_readme() -> None:
    folder = (DATA.parents[1] / "kslserve" / "templates").resolve()
    readme = (folder / "README.md").read_text()
    stated = dict(re.findall(r"`(\w+\.jinja)` \| [\d.]+ \| `([0-9a-f]{64})`", readme))
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.jinja")
    }
    assert files == stated
    assert len(files) == 3


def test_damaged_template_is_one_sentence() -> None:
    with pytest.raises(ModelFileError, match="chat template"):
        ChatTemplate("{% for %}")


def test_tojson_takes_options_and_escapes_nothing() -> None:
    template = ChatTemplate("{{ messages | tojson(indent=1) }}{{ tools | tojson }}")
    assert template.render(["<é>"], ["&"]) == '[\n "<é>"\n]["&"]'


def test_template_cannot_reach_the_interpreter() -> None:
    template = ChatTemplate("{{ messages.__class__.__mro__ }}")
    with pytest.raises(jinja2.exceptions.SecurityError):
        template.render([])


def test_control_tokens_of_the_small_vocabulary_are_covered() -> None:
    assert set(nano().control_tokens) <= set(CONTROL_TOKENS)


@pytest.mark.parametrize("version", GENERATIONS)
def test_rendering_keeps_no_message(version: str) -> None:
    """Without a collector of cycles."""

    class Content(dict[str, Any]):
        pass

    messages = [Content(role=role, content="What is left?") for role in ("user", "assistant")] * 3
    tools = [Content(TOOL)]
    kept = [weakref.ref(item) for item in (*messages, *tools)]
    gc.disable()
    try:
        TEMPLATES[version].render(messages, tools, add_generation_prompt=True)
        del messages, tools
        assert [ref() for ref in kept if ref() is not None] == []
    finally:
        gc.enable()
