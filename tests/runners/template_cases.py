"""Runs cases of the kind `template`: a request to its prompt, for every generation of the model."""

from __future__ import annotations

import json
from typing import Any

from kslserve.api import chat, messages_parse
from kslserve.core.request import Request
from kslserve.core.sampling import SamplingParams
from kslserve.errors import KslError
from kslserve.text.rendered import Rendered
from kslserve.text.template import ChatTemplate, bundled
from tests.runners.files import Case
from tests.unit.text.text_support import nano

TEMPLATES = {version: ChatTemplate(bundled(version)) for version in ("3.5", "3.6", "3.8")}
_HIDDEN = messages_parse.DefaultThinking.HIDDEN


def run_template(case: Case, version: str) -> None:
    expect = case["expect"]
    status, rendered = 200, None
    try:
        rendered = render(version, case["request"])
    except KslError as error:
        status = error.status
    wanted = expect.get("status", 200)
    assert status in (wanted if isinstance(wanted, list) else [wanted]), f"status {status}"
    if rendered is None:
        return
    for op, value in expect.get("prompt", ()):
        check_prompt(op, value, rendered.text)
    ids = nano().encode_rendered(rendered).tolist()
    for token, count in expect.get("control_token_count", {}).items():
        found = ids.count(nano().id_of(token))
        assert found == count, f"{token} stands there {found} times"
    assert expect.get("decoded_contains", "") in b"".join(map(nano().token_bytes, ids)).decode()
    if "prefix_of" in expect:
        for key in ("reasoning_content", "reasoning"):
            following = renamed(expect["prefix_of"]["next_request"], key)
            grown = rendered.text + expect["prefix_of"]["generated"]
            assert render(version, following).text.startswith(grown), "not a prefix"
    if "same_prompt_as" in expect:
        other = render(version, expect["same_prompt_as"]).text
        assert other == rendered.text, "another prompt"


def render(version: str, body: dict[str, Any]) -> Rendered:
    request = _request(body)
    return TEMPLATES[version].prompt(
        request.messages,
        request.tools,
        thinking=request.thinking,
        effort=request.effort,
        extra=request.template_vars,
    )


def _request(body: dict[str, Any]) -> Request:
    fields = {"model": "m", **{key: value for key, value in body.items() if key != "api"}}
    if body.get("api") == "messages":
        data = json.dumps({"max_tokens": 16, **fields}).encode()
        return messages_parse.parse(data, SamplingParams(), _HIDDEN, lambda: None).request
    return chat.parse(fields, SamplingParams())


def check_prompt(op: str, value: Any, text: str) -> None:
    if op == "contains":
        assert value in text, f"{value!r} is missing"
    elif op == "not_contains":
        assert value not in text, f"{value!r} is there"
    elif op == "endswith_any":
        assert text.endswith(tuple(value)), f"it ends in {text[-60:]!r}"
    else:
        assert op == "order", f"unknown operator {op}"
        at = 0
        for part in value:
            at = text.find(part, at)
            assert at >= 0, f"{part!r} is missing or not in its place"
            at += len(part)


def renamed(body: dict[str, Any], key: str) -> dict[str, Any]:
    """The request with reasoning under `key`."""
    messages = [
        {key if name == "reasoning_content" else name: value for name, value in message.items()}
        for message in body["messages"]
    ]
    return {**body, "messages": messages}
