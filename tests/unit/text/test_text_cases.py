"""The shared cases of kind `template`: a chat request to the prompt, for every generation."""

from __future__ import annotations

from typing import Any

import pytest

from kslserve.api import chat
from kslserve.core.sampling import SamplingParams
from kslserve.errors import KslError
from kslserve.text.rendered import Rendered
from kslserve.text.template import ChatTemplate, bundled
from tests.unit.text.text_support import load_cases, nano

TEMPLATES = {version: ChatTemplate(bundled(version)) for version in ("3.5", "3.6", "3.8")}
# Requests of the other dialects belong to their own tests.
CASES = [case for case in load_cases("template") if "api" not in case["request"]]


def render(version: str, body: dict[str, Any]) -> Rendered:
    request = chat.parse({"model": "m", **body}, SamplingParams())
    return TEMPLATES[version].prompt(
        request.messages,
        request.tools,
        thinking=request.thinking,
        effort=request.effort,
        extra=request.template_vars,
    )


def check_prompt(op: str, value: Any, text: str) -> None:
    if op == "contains":
        assert value in text
    elif op == "not_contains":
        assert value not in text
    else:
        assert op == "order"
        at = 0
        for part in value:
            at = text.index(part, at) + len(part)


@pytest.mark.parametrize("version", TEMPLATES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(version: str, case: dict[str, Any]) -> None:
    expect = case["expect"]
    status, rendered = 200, None
    try:
        rendered = render(version, case["request"])
    except KslError as error:
        status = error.status
    assert status in expect.get("status", [200])
    if rendered is None:
        return
    for op, value in expect.get("prompt", ()):
        check_prompt(op, value, rendered.text)
    ids = nano().encode_rendered(rendered).tolist()
    for token, count in expect.get("control_token_count", {}).items():
        assert ids.count(nano().id_of(token)) == count
    assert expect.get("decoded_contains", "") in b"".join(map(nano().token_bytes, ids)).decode()
    if "prefix_of" in expect:
        for key in ("reasoning_content", "reasoning"):
            following = renamed(expect["prefix_of"]["next_request"], key)
            grown = rendered.text + expect["prefix_of"]["generated"]
            assert render(version, following).text.startswith(grown)


def renamed(body: dict[str, Any], key: str) -> dict[str, Any]:
    """The request with reasoning under `key`."""
    messages = [
        {key if name == "reasoning_content" else name: value for name, value in message.items()}
        for message in body["messages"]
    ]
    return {**body, "messages": messages}
