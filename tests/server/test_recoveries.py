"""A call that strays from the format reaches the client as a call; it is counted and collected."""

from __future__ import annotations

import json
from pathlib import Path

from tests.server.api_cases import post
from tests.server.serving import get_text, metric_of, script_settings, serving

TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
CALL = '{"name": "read", "arguments": {"path": "a.py"}}'


def test_a_drift_over_the_wire(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    output = {"chunks": ["Now", ".\n", *CALL], "end": "stop", "thinking": False}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    settings = script_settings(tmp_path, [output], drift_corpus=str(corpus))
    with serving(settings) as server:
        status, _, text = post(server, "/v1/chat/completions", json.dumps(body).encode())
        assert status == 200
        choice = json.loads(text)["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Now."
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "read"
        assert json.loads(call["function"]["arguments"]) == {"path": "a.py"}
        name = 'toolcall_recoveries_total{family="json"}'
        assert metric_of(get_text(server.root + "/metrics"), name) == 1
        # Where the answer itself is JSON, it stays the answer.
        body["response_format"] = {"type": "json_object"}
        status, _, text = post(server, "/v1/chat/completions", json.dumps(body).encode())
        assert status != 200 or "tool_calls" not in json.loads(text)["choices"][0]["message"]
        assert metric_of(get_text(server.root + "/metrics"), name) == 1
    (line,) = corpus.read_text().splitlines()
    assert json.loads(line) == {"family": "json", "tools": ["read"], "text": CALL}


def test_recovery_can_be_turned_off(tmp_path: Path) -> None:
    """Bare JSON stays text then; calls as the template has them are calls."""
    call = "<tool_call>\n<function=read>\n<parameter=path>\na.py\n</parameter>\n</function>\n"
    outputs = [
        {"chunks": [*CALL], "end": "stop", "thinking": False},
        {"chunks": [call, "</tool_call>"], "end": "stop", "thinking": False},
    ]
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]}
    with serving(script_settings(tmp_path, outputs, recover_calls=False)) as server:
        messages = []
        for _ in outputs:
            status, _, text = post(server, "/v1/chat/completions", json.dumps(body).encode())
            assert status == 200
            messages.append(json.loads(text)["choices"][0]["message"])
    assert messages[0]["content"] == CALL
    assert "tool_calls" not in messages[0]
    (found,) = messages[1]["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == {"path": "a.py"}
