"""Runs cases of kind `api`: a request, what a scripted model says, and checks on the answer.

Every case gets a server of its own with its script. The checks are a small language: paths with
`[i]`, `[-1]` and `[*]`, and operators on the value found there; for streams, conditions over the
list of events. A check that does not hold raises AssertionError with its text.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from pathlib import Path
from typing import Any

from kslserve.api import chat
from tests.server.serving import Server, script_settings, serving

CONTEXT = 2048
PATHS = {"chat": "/v1/chat/completions"}
MODEL = "any-model"
ABSENT = object()


def load_cases(path: Path, level: str) -> list[dict[str, Any]]:
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return [case for case in cases if case["level"] == level]


def run_case(case: dict[str, Any], folder: Path) -> None:
    """One case in each of its modes."""
    output = case.get("model_output", {"chunks": ["ok"], "end": "stop"})
    with serving(script_settings(folder, [output], context=CONTEXT)) as server:
        results = {}
        for mode in case.get("modes", ["json", "stream"]):
            results[mode] = _run_mode(server, case, mode)
        for path in case["expect"].get("modes_agree", []):
            _modes_agree(path, results)


def _run_mode(server: Server, case: dict[str, Any], mode: str) -> Any:
    expect = case["expect"]
    body = _body(case["request"], mode)
    begun = time.monotonic()
    status, content_type, text = post(server, PATHS[case["api"]], body)
    elapsed_ms = (time.monotonic() - begun) * 1e3
    allowed = expect["status"] if isinstance(expect["status"], list) else [expect["status"]]
    if "or_stream" in expect and status == 200:
        check_stream(expect["or_stream"], events_of(text))
        return None
    assert status in allowed, f"status {status}: {text[:300]}"
    assert elapsed_ms <= expect.get("within_ms", float("inf"))
    if status != 200:
        for check in expect.get("error_json", []):
            check_value(json.loads(text), *check)
        return None
    if "prompt" in expect:
        _check_prompt(server, body, expect["prompt"])
    if content_type.startswith("text/event-stream"):
        events = events_of(text)
        check_stream(expect.get("stream", []), events)
        return events
    answer = json.loads(text)
    for check in expect.get("json", []):
        check_value(answer, *check)
    return answer


def _body(request: dict[str, Any], mode: str) -> bytes:
    if "$raw" in request:
        return request["$raw"].replace("${MODEL}", MODEL).encode()
    body = {"model": MODEL, **_expand(request)}
    if mode != "raw":
        body["stream"] = mode == "stream"
    if not body.get("stream"):
        body.pop("stream_options", None)
    return json.dumps(body).encode()


def _expand(value: Any) -> Any:
    if isinstance(value, dict):
        if "$repeat" in value:
            text, count = value["$repeat"]
            return text * (CONTEXT if count == "${CTX}" else int(count))
        return {key: _expand(item) for key, item in value.items()}
    return [_expand(item) for item in value] if isinstance(value, list) else value


def post(server: Server, path: str, body: bytes) -> tuple[int, str, str]:
    """(status, content type, body)"""
    address = server.app.address
    connection = http.client.HTTPConnection(address.host, address.port, timeout=30)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.headers["content-type"], response.read().decode()
    finally:
        connection.close()


def events_of(text: str) -> list[Any]:
    """Events of a stream; the end marker of a chat stream is the text `done`."""
    events = []
    for frame in text.strip("\n").split("\n\n"):
        assert frame.startswith("data: "), frame
        data = frame.removeprefix("data: ")
        events.append("done" if data == "[DONE]" else json.loads(data))
    return events


def _check_prompt(server: Server, body: bytes, checks: list[list[Any]]) -> None:
    service = server.app.state.service
    assert service is not None
    prompt = service.preparer.prepare_now(chat.parse(body, service.model.defaults)).text
    for operator, value in checks:
        check_value({"prompt": prompt}, "prompt", operator, value)


# ---------------------------------------------------------------- paths and operators


def find(value: Any, path: str) -> list[Any]:
    """All values at a path; an absent one gives [ABSENT]."""
    found = [value]
    for name, index in re.findall(r"([^.\[\]]+)|\[([^\]]+)\]", path):
        step: list[Any] = []
        for item in found:
            if index == "*":
                step += item if isinstance(item, list) else [ABSENT]
            elif index:
                inside = isinstance(item, list) and -len(item) <= int(index) < len(item)
                step.append(item[int(index)] if inside else ABSENT)
            else:
                step.append(item.get(name, ABSENT) if isinstance(item, dict) else ABSENT)
        found = step
    return found or [ABSENT]


def check_value(root: Any, path: str, operator: str, value: Any = None) -> None:
    for found in find(root, path):
        assert holds(root, found, operator, value), f"{path} {operator} {value!r}: {found!r}"


def holds(root: Any, found: Any, operator: str, value: Any) -> bool:
    if operator == "exists":
        return found is not ABSENT and found is not None
    if operator == "is_null":
        return found is None
    if operator == "type":
        names = {"string": str, "number": (int, float), "object": dict, "array": list}
        return isinstance(found, names[value])
    if operator == "eq_sum":
        return found == sum(find(root, path)[0] for path in value)
    if operator == "len_eq":
        return isinstance(found, (list, str)) and len(found) == value
    if operator in ("ge", "le"):
        number = isinstance(found, (int, float))
        return number and (found >= value if operator == "ge" else found <= value)
    if operator == "in":
        return found in value
    if operator == "json_eq":
        return json.loads(found) == value
    if operator in ("eq", "eq_list"):
        return (found or "") == value if isinstance(value, str) else found == value
    text = "" if found in (None, ABSENT) else str(found)
    if operator == "contains":
        return value in text
    if operator == "not_contains":
        return value not in text
    assert operator == "starts_with", operator
    return text.startswith(value)


# ---------------------------------------------------------------- streams


def type_of(event: Any) -> str:
    return event if isinstance(event, str) else "chunk"


def _matches(event: Any, condition: dict[str, Any]) -> bool:
    if type_of(event) != condition["type"]:
        return False
    if "path" not in condition:
        return True
    path, operator = condition["path"], condition["op"]
    return any(holds(event, f, operator, condition.get("value")) for f in find(event, path))


def check_stream(checks: list[dict[str, Any]], events: list[Any]) -> None:
    for check in checks:
        text = json.dumps(check)
        if "count" in check:
            count = sum(_matches(event, check["count"]) for event in events)
            assert count == check["eq"], f"{text}: {count}"
        elif "none" in check:
            assert not any(_matches(event, check["none"]) for event in events), text
        elif "last" in check:
            assert type_of(events[-1]) == check["last"], text
        else:
            where = check["where"]
            chosen = [event for event in events if type_of(event) == where["type"]]
            if "when" in where:
                path, operator, *value = where["when"]
                chosen = [
                    event
                    for event in chosen
                    if holds(event, find(event, path)[0], operator, value[0] if value else None)
                ]
            assert chosen, f"{text}: no such event"
            for event in chosen:
                check_value(event, check["path"], check["op"], check.get("value"))


def _modes_agree(path: str, results: dict[str, Any]) -> None:
    """The whole answer and the stream end with the same value at a path."""
    if any(result is None for result in results.values()):
        return
    answer = find(results["json"], path)[0]
    streamed = [
        found
        for event in results["stream"]
        if isinstance(event, dict)
        for found in find(event, path)
        if found not in (None, ABSENT)
    ]
    assert streamed[-1] == answer, f"{path}: {answer!r} and {streamed!r}"
