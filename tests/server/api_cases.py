"""Runs cases of kind `api`: a request, what a scripted model says, and checks on the answer.

Every case gets a server of its own with its script. The checks are a small language: paths with
`[i]`, `[-1]` and `[*]`, and operators on the value found there; for streams, conditions over the
list of events. A check that does not hold raises AssertionError with its text.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

from kslserve.api import chat, messages_parse, responses
from kslserve.api.responses_tools import CUSTOM_PARAMETER
from kslserve.core.request import Request
from kslserve.service.model import ServedModel
from tests.server.serving import Server, script_settings, serving

CONTEXT = 2048
PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "responses": "/v1/responses",
}
MODEL = "any-model"
ABSENT = object()


def load_cases(path: Path, level: str) -> list[dict[str, Any]]:
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return [case for case in cases if case["level"] == level]


def run_case(case: dict[str, Any], folder: Path) -> None:
    """One case in each of its modes."""
    output = case.get("model_output", {"chunks": ["ok"], "end": "stop"})
    named = [chunk.replace("${CUSTOM_PARAM}", CUSTOM_PARAMETER) for chunk in output["chunks"]]
    output = {**output, "chunks": named}
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
    path = PATHS[case["api"]] + expect.get("path_suffix", "")
    status, content_type, text = post(server, path, body)
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
        _check_prompt(server, case["api"], body, expect["prompt"])
    if content_type.startswith("text/event-stream"):
        events = events_of(text)
        check_stream(expect.get("stream", []), events)
        return events
    answer = json.loads(text)
    for check in expect.get("json", []):
        check_value(answer, *check)
    if "equals_usage_of" in expect:
        _check_count(server, case["request"], answer["input_tokens"], expect["equals_usage_of"])
    return answer


def _check_count(
    server: Server, request: dict[str, Any], count: int, other: dict[str, Any]
) -> None:
    """A count is what a real request with the same content is told; cached tokens belong to it."""
    body = _body({**request, **other.get("add", {})}, "json")
    _, _, text = post(server, PATHS[other["api"]], body)
    usage = json.loads(text)["usage"]
    kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert count == sum(usage[kind] for kind in kinds), f"{count}: {usage}"


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
    """Events of a stream; the end marker of a chat stream is the text `done`. Where an event has a
    name, its data has the same one."""
    events = []
    for frame in text.strip("\n").split("\n\n"):
        head, _, data = frame.partition("data: ")
        assert "\n" not in data, frame
        event: Any = "done" if data == "[DONE]" else json.loads(data)
        assert head == (f"event: {event['type']}\n" if "type" in event else ""), frame
        events.append(event)
    return events


def request_of(api: str, body: bytes, model: ServedModel) -> Request:
    """What the server reads in a body."""
    if api == "chat":
        return chat.parse(body, model.defaults)
    if api == "responses":
        return responses.parse(body, model.defaults)
    default = messages_parse.DefaultThinking.HIDDEN
    return messages_parse.parse(body, model.defaults, default, lambda: None).request


def _check_prompt(server: Server, api: str, body: bytes, checks: list[list[Any]]) -> None:
    service = server.app.state.service
    assert service is not None
    prompt = service.preparer.prepare_now(request_of(api, body, service.model)).text
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
    values = find(root, path)
    if operator == "eq_list":
        assert values == value, f"{path} {operator} {value!r}: {values!r}"
        return
    for found in values:
        assert holds(root, found, operator, value), f"{path} {operator} {value!r}: {found!r}"


def holds(root: Any, found: Any, operator: str, value: Any) -> bool:
    if operator == "exists":
        return found is not ABSENT and found is not None
    if operator == "is_null":
        return found is None
    if operator == "type":
        names: dict[str, tuple[type, ...]] = {
            "string": (str,),
            "number": (int, float),
            "object": (dict,),
            "array": (list,),
        }
        return isinstance(found, names[value])
    if operator == "eq_sum":
        return found == sum(find(root, path)[0] for path in value)
    if operator == "ne_path":
        return found != find(root, value)[0]
    if operator == "len_eq":
        return isinstance(found, (list, str)) and len(found) == value
    if operator in ("ge", "le"):
        number = isinstance(found, (int, float))
        return number and (found >= value if operator == "ge" else found <= value)
    if operator == "in":
        return found in value
    if operator == "json_eq":
        return json.loads(found) == value
    if operator == "eq":
        return (found or "") == value if isinstance(value, str) else found == value
    text = "" if found in (None, ABSENT) else str(found)
    if operator == "contains":
        return value in text
    if operator == "contains_ci":
        return value.lower() in text.lower()
    if operator == "not_contains":
        return value not in text
    if operator == "eq_trim":
        return text.strip() == value
    if operator == "order":
        at = 0
        for part in value:
            at = text.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return True
    assert operator == "starts_with", operator
    return text.startswith(value)


# ---------------------------------------------------------------- streams


def is_type(event: Any, wanted: str) -> bool:
    """wanted: a type, or `type:delta_type`."""
    if isinstance(event, str):
        return event == wanted
    kind, _, delta = wanted.partition(":")
    return event.get("type", "chunk") == kind and (not delta or event["delta"]["type"] == delta)


def _matches(event: Any, condition: dict[str, Any]) -> bool:
    if not is_type(event, condition["type"]):
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
            assert is_type(events[-1], check["last"]), text
        elif "order" in check:
            rest = iter(events)
            assert all(any(is_type(e, kind) for e in rest) for kind in check["order"]), text
        elif "joined_json" in check:
            fields = check["joined_json"]
            parts = [find(e, fields["path"])[0] for e in events if is_type(e, fields["type"])]
            joined = "".join(part for part in parts if isinstance(part, str))
            assert json.loads(joined) == check["eq"], f"{text}: {joined}"
        elif "block_indexes" in check:
            _check_blocks(events)
        elif "increasing" in check:
            numbers = [find(event, check["increasing"])[0] for event in events]
            assert all(a < b for a, b in itertools.pairwise(numbers)), f"{text}: {numbers}"
        elif "last_typed" in check:
            typed = [event for event in events if isinstance(event, dict)]
            assert is_type(typed[-1], check["last_typed"]), text
        elif "unique" in check:
            fields = check["unique"]
            values = [find(e, fields["path"])[0] for e in events if is_type(e, fields["type"])]
            assert values, text
            assert len(values) == len(set(values)), f"{text}: {values}"
        elif "items_match_final" in check or "item_ids_consistent" in check:
            _check_items(events)
        elif "each_data_is_json" in check or "event_name_matches_type" in check:
            pass  # `events_of` did
        else:
            where = check["where"]
            chosen = [event for event in events if is_type(event, where["type"])]
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


def _check_blocks(events: list[Any]) -> None:
    """Content blocks are numbered from 0 and do not overlap."""
    blocks = [e for e in events if isinstance(e, dict) and e["type"].startswith("content_block_")]
    started, is_open = -1, False
    for event in blocks:
        if event["type"] == "content_block_start":
            assert not is_open, event
            started, is_open = started + 1, True
        assert is_open, event
        assert event["index"] == started, event
        is_open = event["type"] != "content_block_stop"
    assert not is_open


def _check_items(events: list[Any]) -> None:
    """All events of an item carry its id and index; the finished items are the final output."""
    places = {
        event["item"]["id"]: event["output_index"]
        for event in events
        if event["type"] == "response.output_item.added"
    }
    output = events[-1]["response"]["output"]
    for event in events:
        item_id = event.get("item_id") or event.get("item", {}).get("id")
        if item_id is not None:
            assert event["output_index"] == places[item_id], event
        if event["type"] == "response.output_item.done":
            assert output[event["output_index"]] == event["item"], event
    assert len(output) == len(places)


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
