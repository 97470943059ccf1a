"""core.Events -> Messages bytes, streamed and whole."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve import errors
from kslserve.api.merge import merge
from kslserve.api.messages_encode import (
    SIGNATURE,
    MessagesCollector,
    MessagesEncoder,
    error_response,
    new_call_id,
)
from kslserve.core.events import (
    Event,
    Failed,
    Finished,
    LogprobsDelta,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kslserve.core.usage import FinishReason, Usage

USAGE = Usage(prompt_tokens=900, cached_tokens=800, completion_tokens=30, reasoning_tokens=4)
COUNTS = {
    "input_tokens": 100,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 800,
    "output_tokens": 30,
    "output_tokens_details": {"thinking_tokens": 4},
}
SCRIPT: list[list[Event]] = [
    [Started()],
    [ReasoningDelta("because\n")],
    [ReasoningDelta("so"), TextDelta("Hé"), TextDelta('"llo')],
    [ToolCallStart(0, "toolu_1", "bash"), ToolCallDelta(0, '{"command"'), ToolCallDelta(0, ": ")],
    [ToolCallDelta(0, '"ls"}'), ToolCallEnd(0), ToolCallStart(1, "toolu_2", "pwd")],
    [ToolCallDelta(1, "{}"), ToolCallEnd(1), TextDelta("done")],
    [Finished(FinishReason.TOOL_CALLS, USAGE)],
]


def parsed(data: bytes) -> list[Any]:
    """Events of a stream, each named like its type."""
    events = []
    for frame in data.decode().split("\n\n")[:-1]:
        name, line = frame.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def encoder(*, show: bool = True, usage: Usage = USAGE) -> MessagesEncoder:
    made = MessagesEncoder('mo"del', show_thinking=show)
    made.attach(42, usage)
    return made


def stream(script: list[list[Event]], *, show: bool = True) -> list[Any]:
    made = encoder(show=show)
    return parsed(b"".join(made.encode(batch) for batch in script))


def whole(script: list[list[Event]], *, show: bool = True) -> Any:
    made = MessagesCollector('mo"del', show_thinking=show)
    made.attach(42, USAGE)
    ends = [made.fold(batch) for batch in script]
    assert ends[:-1] == [None] * (len(script) - 1)
    assert isinstance(ends[-1], Finished)
    return json.loads(made.body(ends[-1]))


def assembled(events: list[Any]) -> Any:
    """The message that a client puts together."""
    message: dict[str, Any] = {}
    arguments = ""
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                delta, block = event["delta"], message["content"][-1]
                if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] += delta[field]
            case "content_block_stop":
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


def test_the_stream() -> None:
    events = stream(SCRIPT)
    first = events[0]["message"]
    assert first.pop("id").startswith("msg_")
    assert first == {
        "type": "message", "role": "assistant", "model": 'mo"del', "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": COUNTS, "x_kslserve": {"seed": 42},
    }  # fmt: skip
    assert events[1:] == [
        {"type": "ping"},
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "thinking_delta", "thinking": "because\n"}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "thinking_delta", "thinking": "so"}},
        {"type": "content_block_delta", "index": 0,
         "delta": {"type": "signature_delta", "signature": SIGNATURE}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1,
         "delta": {"type": "text_delta", "text": 'Hé"llo'}},
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2,
         "content_block": {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {}}},
        {"type": "content_block_delta", "index": 2,
         "delta": {"type": "input_json_delta", "partial_json": '{"command": '}},
        {"type": "content_block_delta", "index": 2,
         "delta": {"type": "input_json_delta", "partial_json": '"ls"}'}},
        {"type": "content_block_stop", "index": 2},
        {"type": "content_block_start", "index": 3,
         "content_block": {"type": "tool_use", "id": "toolu_2", "name": "pwd", "input": {}}},
        {"type": "content_block_delta", "index": 3,
         "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"type": "content_block_stop", "index": 3},
        {"type": "content_block_start", "index": 4, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 4,
         "delta": {"type": "text_delta", "text": "done"}},
        {"type": "content_block_stop", "index": 4},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None},
         "usage": COUNTS},
        {"type": "message_stop"},
    ]  # fmt: skip


def test_the_whole_answer() -> None:
    body = whole(SCRIPT)
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message", "role": "assistant", "model": 'mo"del',
        "content": [
            {"type": "thinking", "thinking": "because\nso", "signature": SIGNATURE},
            {"type": "text", "text": 'Hé"llo'},
            {"type": "tool_use", "id": "toolu_1", "name": "bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "toolu_2", "name": "pwd", "input": {}},
            {"type": "text", "text": "done"},
        ],
        "stop_reason": "tool_use", "stop_sequence": None, "usage": COUNTS,
        "x_kslserve": {"seed": 42},
    }  # fmt: skip


def test_hidden_reasoning_leaves_no_block() -> None:
    for message in (assembled(stream(SCRIPT, show=False)), whole(SCRIPT, show=False)):
        kinds = [block["type"] for block in message["content"]]
        assert kinds == ["text", "tool_use", "tool_use", "text"]
        assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 4}
    events = parsed(encoder(show=False).encode([ReasoningDelta("x")]) or b"")
    assert events == []


def test_nothing_said_is_no_block() -> None:
    script: list[list[Event]] = [
        [Started(), ReasoningDelta(""), TextDelta(""), LogprobsDelta(())],
        [Finished(FinishReason.STOP, USAGE)],
    ]
    kinds = [event["type"] for event in stream(script)]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
    assert whole(script)["content"] == []


@pytest.mark.parametrize(
    ("reason", "stop_string", "wanted"),
    [
        (FinishReason.STOP, None, ("end_turn", None)),
        (FinishReason.STOP_STRING, "\n\n", ("stop_sequence", "\n\n")),
        (FinishReason.LENGTH, None, ("max_tokens", None)),
        (FinishReason.WINDOW, None, ("model_context_window_exceeded", None)),
        (FinishReason.TOOL_CALLS, None, ("tool_use", None)),
        (FinishReason.CANCELLED, None, ("end_turn", None)),
    ],
)
def test_stop_reasons(
    reason: FinishReason, stop_string: str | None, wanted: tuple[str, str | None]
) -> None:
    script: list[list[Event]] = [[Started()], [Finished(reason, USAGE, stop_string)]]
    for message in (assembled(stream(script)), whole(script)):
        assert (message["stop_reason"], message["stop_sequence"]) == wanted


def test_a_call_that_was_cut_off() -> None:
    """Its block ends as far as it got; whole, it is left out, since it is no object."""
    script: list[list[Event]] = [
        [Started(), TextDelta("a"), ToolCallStart(0, "toolu_1", "bash")],
        [ToolCallDelta(0, '{"command": "l')],
        [Finished(FinishReason.LENGTH, USAGE)],
    ]
    kinds = [event["type"] for event in stream(script)]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert whole(script)["content"] == [{"type": "text", "text": "a"}]


def test_started_twice_and_heartbeat() -> None:
    made = encoder(usage=Usage(prompt_tokens=7))
    events = parsed(made.encode([Started()]) + made.heartbeat() + made.encode([Started()]))
    assert [event["type"] for event in events] == ["message_start", "ping", "ping"]
    assert events[0]["message"]["usage"]["input_tokens"] == 7


def test_ids_differ() -> None:
    ids = {new_call_id() for _ in range(64)}
    assert len(ids) == 64
    assert all(call_id.startswith("toolu_") for call_id in ids)
    assert stream(SCRIPT)[0]["message"]["id"] != stream(SCRIPT)[0]["message"]["id"]


_PIECES = st.sampled_from(
    [
        ReasoningDelta("r\n"),
        ReasoningDelta(""),
        TextDelta("t"),
        TextDelta('é"\n'),
        TextDelta(""),
    ]
)


@given(st.lists(_PIECES, max_size=12), st.integers(0, 3), st.data())
def test_cuts_and_merging_change_nothing(
    pieces: list[Event], calls: int, data: st.DataObject
) -> None:
    events: list[Event] = [Started(), *pieces]
    for index in range(calls):
        events += [
            ToolCallStart(index, f"toolu_{index}", "f"),
            ToolCallDelta(index, '{"a": '),
            ToolCallDelta(index, f"{index}}}"),
            ToolCallEnd(index),
        ]
    events.append(Finished(FinishReason.STOP, USAGE))
    cuts = data.draw(st.lists(st.integers(0, len(events)), max_size=5).map(sorted))
    bounds = itertools.pairwise([0, *cuts, len(events)])
    batches = [events[a:b] for a, b in bounds if a < b]
    once, cut = assembled(stream([merge(events)])), assembled(stream(batches))
    collected = whole(batches)
    for message in (once, cut, collected):
        assert message.pop("id")
    assert once == cut == collected
    assert all(block.get("text", "x") for block in once["content"])


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.InvalidRequest("x", param="a.b"), 400, "invalid_request_error"),
        (errors.InvalidApiKey("x"), 401, "authentication_error"),
        (errors.OriginNotAllowed("x"), 403, "permission_error"),
        (errors.NotFound("x"), 404, "not_found_error"),
        (errors.MethodNotAllowed("x"), 405, "invalid_request_error"),
        (errors.RequestTimeout("x"), 408, "invalid_request_error"),
        (errors.BodyTooLarge("x"), 413, "request_too_large"),
        (errors.UnknownHost("x"), 421, "permission_error"),
        (errors.QueueFull("x"), 429, "rate_limit_error"),
        (errors.KslError("x"), 500, "api_error"),
        (errors.Unavailable("x"), 503, "overloaded_error"),
        (errors.RequestExpired("x"), 504, "timeout_error"),
    ],
)
def test_error_table(error: errors.KslError, status: int, kind: str) -> None:
    response = error_response(error, "req_1")
    assert response.status == status
    assert json.loads(response.body) == {
        "type": "error", "error": {"type": kind, "message": "x"}, "request_id": "req_1",
    }  # fmt: skip
    assert ("retry-after" in dict(response.headers)) == (status in (429, 503))
    (event,) = parsed(encoder().error(error))
    assert event == {"type": "error", "error": {"type": kind, "message": "x"}}


def test_too_long_is_worded_exactly() -> None:
    body = json.loads(error_response(errors.ContextLengthExceeded(213456, 131072), "r").body)
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 213456 tokens > 131072 maximum",
    }


def test_failed_is_left_to_the_connection() -> None:
    failed = Failed(errors.Unavailable("x"), USAGE)
    assert encoder().encode([failed]) == b""
    collector = MessagesCollector("m", show_thinking=True)
    assert collector.fold([TextDelta("a"), failed]) is failed
