"""The scripted engine behind the whole server: what it is held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.api_cases import post
from tests.server.serving import script_settings, serving

SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "unit": {"enum": ["m", "km"]}},
    "required": ["count", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    ("chunks", "content"),
    [
        ([*'{"count": 12, "unit": "km"}'], '{"count": 12, "unit": "km"}'),
        (['Sure: {"count": 12', ', "unit": "km"} is it.'], '{"count": 12, "unit": "km"}'),
        (['{"count": 12, "unit": "miles"', "}"], '{"count": 12, "unit": "m"}'),
        (["Well", "\n", '{"count": 12, "unit": "m"}'], '{"count": 12, "unit": "m"}'),
        (['{"count": 12, "un'], '{"count": 12, "unit":"km"}'),
    ],
)
def test_a_script_is_held_to_a_schema(
    tmp_path: Path, chunks: list[str], content: str, thinking: bool
) -> None:
    """As a model is: text outside of the schema cannot be said."""
    wanted = {"type": "json_schema", "json_schema": {"name": "out", "schema": SCHEMA}}
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": wanted,
        "enable_thinking": thinking,
    }
    with serving(script_settings(tmp_path, [{"chunks": chunks, "thinking": False}])) as server:
        status, _, text = post(server, "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200
    choice = json.loads(text)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")
