"""core.Events -> Chat Completions bytes, streamed and whole."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.api.chat_encode import ChatCollector, ChatEncoder
from kslserve.api.merge import merge
from kslserve.core.events import (
    Event,
    Failed,
    Finished,
    LogprobsDelta,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kslserve.core.usage import FinishReason, Usage
from kslserve.errors import BadLogits, Unavailable

USAGE = Usage(prompt_tokens=9, cached_tokens=8, completion_tokens=5, reasoning_tokens=3)
SCRIPT: list[list[Event]] = [
    [Started()],
    [ReasoningDelta("because\n")],
    [ReasoningDelta("so"), TextDelta("Hé"), TextDelta('"llo')],
    [ToolCallStart(0, "call_1", "bash"), ToolCallDelta(0, '{"command"'), ToolCallDelta(0, ": ")],
    [ToolCallDelta(0, '"ls"}'), ToolCallEnd(0), ToolCallStart(1, "call_2", "pwd")],
    [ToolCallDelta(1, "{}"), ToolCallEnd(1), Finished(FinishReason.TOOL_CALLS, USAGE)],
]


def frames(data: bytes) -> list[Any]:
    """Parsed `data:` frames; DONE stays text."""
    assert data.endswith(b"\n\n")
    parsed = []
    for frame in data[:-2].split(b"\n\n"):
        assert frame.startswith(b"data: ")
        assert b"\n" not in frame
        text = frame[6:].decode()
        parsed.append(text if text == "[DONE]" else json.loads(text))
    return parsed


def encoder(*, include_usage: bool = False) -> ChatEncoder:
    made = ChatEncoder('mo"del', "fp-1", include_usage=include_usage)
    made.attach(42, USAGE)
    return made


def stream(script: list[list[Event]], *, include_usage: bool = False) -> list[Any]:
    made = encoder(include_usage=include_usage)
    return frames(b"".join(made.encode(batch) for batch in script))


def test_the_order_of_chunks() -> None:
    chunks = stream(SCRIPT, include_usage=True)
    assert chunks[-1] == "[DONE]"
    counts, last = chunks[-2], chunks[-3]
    assert counts["choices"] == []
    assert counts["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]
    assert last["x_kslserve"] == {"seed": 42}
    deltas = [c["choices"][0]["delta"] for c in chunks[:-3]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "because\n"},
        {"reasoning_content": "so"},
        {"content": 'Hé"llo'},
        {"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                         "function": {"name": "bash", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"command": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"ls"}'}}]},
        {"tool_calls": [{"index": 1, "id": "call_2", "type": "function",
                         "function": {"name": "pwd", "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
    ]  # fmt: skip
    for chunk in chunks[:-1]:
        assert chunk["object"] == "chat.completion.chunk"
        assert chunk["id"] == chunks[0]["id"]
        assert chunk["id"].startswith("chatcmpl-")
        assert chunk["model"] == 'mo"del'
        assert chunk["system_fingerprint"] == "fp-1"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-3])


def test_usage_only_when_asked() -> None:
    chunks = stream(SCRIPT)
    assert all("usage" not in chunk for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (FinishReason.STOP, "stop"),
        (FinishReason.STOP_STRING, "stop"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.WINDOW, "length"),
        (FinishReason.TOOL_CALLS, "tool_calls"),
        (FinishReason.CANCELLED, "stop"),
    ],
)
def test_finish_reasons(reason: FinishReason, name: str) -> None:
    finished = Finished(reason, USAGE)
    assert stream([[finished]])[0]["choices"][0]["finish_reason"] == name
    body = json.loads(collect([[finished]]))
    assert body["choices"][0]["finish_reason"] == name


def test_the_role_chunk_goes_out_once() -> None:
    made = encoder()
    assert len(frames(made.encode([Started()]))) == 1
    assert made.encode([Started()]) == b""


def test_heartbeat_and_error_frames() -> None:
    made = encoder()
    (beat,) = frames(made.heartbeat())
    assert beat["choices"] == [{"index": 0, "delta": {}, "finish_reason": None}]
    (error,) = frames(made.error(BadLogits("no")))
    assert error == {
        "error": {"message": "no", "type": "server_error", "param": None, "code": "internal_error"}
    }
    assert made.encode([Failed(Unavailable("x"), USAGE)]) == b""


def collect(script: list[list[Event]], *, logprobs: bool = False) -> bytes:
    made = ChatCollector("m", "fp-1", logprobs=logprobs)
    made.attach(42, USAGE)
    terminal = None
    for batch in script:
        terminal = made.fold(batch) or terminal
    assert isinstance(terminal, Finished)
    return made.body(terminal)


def test_the_whole_body() -> None:
    body = json.loads(collect(SCRIPT))
    assert body["object"] == "chat.completion"
    assert body["model"] == "m"
    assert body["x_kslserve"] == {"seed": 42}
    assert body["usage"]["total_tokens"] == 14
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["logprobs"] is None
    message = choice["message"]
    assert message["role"] == "assistant"
    assert message["content"] == 'Hé"llo'
    assert message["reasoning_content"] == "because\nso"
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [
        {"name": "bash", "arguments": '{"command": "ls"}'},
        {"name": "pwd", "arguments": "{}"},
    ]


def test_content_is_null_only_beside_calls() -> None:
    finished = [Finished(FinishReason.STOP, USAGE)]
    message = json.loads(collect([[Started()], finished]))["choices"][0]["message"]
    assert message["content"] == ""
    assert "tool_calls" not in message
    assert "reasoning_content" not in message
    calls: list[Event] = [ToolCallStart(0, "c", "f"), ToolCallDelta(0, "{}"), ToolCallEnd(0)]
    message = json.loads(collect([[Started()], calls, finished]))["choices"][0]["message"]
    assert message["content"] is None


def test_a_failed_generation_is_returned() -> None:
    failed = Failed(Unavailable("x"), USAGE)
    assert ChatCollector("m", "f", logprobs=False).fold([TextDelta("a"), failed]) is failed


ENTRY_A = TokenLogprob(b"H\xc3", 5, -0.5, ((b"H\xc3", 5, -0.5), (b"x", 6, float("-inf"))))
ENTRY_B = TokenLogprob(b"\xa9", 7, -1.0)


def test_logprobs_ride_with_their_text() -> None:
    batch: list[Event] = [LogprobsDelta((ENTRY_A,)), LogprobsDelta((ENTRY_B,)), TextDelta("Hé")]
    finished = Finished(FinishReason.STOP, USAGE)
    chunks = stream([[Started()], batch, [LogprobsDelta((ENTRY_B,))], [finished]])
    choice = chunks[1]["choices"][0]
    assert choice["delta"] == {"content": "Hé"}
    first, second = choice["logprobs"]["content"]
    assert first["bytes"] == [72, 0xC3]
    assert first["token"] == "H\ufffd"
    assert first["logprob"] == -0.5
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -9999.0]
    assert second["top_logprobs"] == []
    assert chunks[2]["choices"][0]["delta"] == {"content": ""}
    assert len(chunks[2]["choices"][0]["logprobs"]["content"]) == 1
    body = json.loads(collect([[Started()], batch, [finished]], logprobs=True))
    assert body["choices"][0]["logprobs"]["content"] == [first, second]


DELTAS = st.one_of(
    st.builds(TextDelta, st.text(min_size=1, max_size=3)),
    st.builds(ReasoningDelta, st.text(min_size=1, max_size=3)),
    st.builds(ToolCallDelta, st.integers(0, 1), st.text(min_size=1, max_size=3)),
    st.builds(LogprobsDelta, st.just((ENTRY_B,))),
)


@given(st.lists(DELTAS, max_size=12), st.integers(0, 12))
def test_merging_changes_no_text(events: list[Event], cut: int) -> None:
    """Merged at once or in two steps: texts in order, the same number of entries, no equal
    neighbours."""

    def texts(items: list[Event]) -> list[tuple[str, str]]:
        joined: list[tuple[str, str]] = []
        for e in items:
            match e:
                case TextDelta(text):
                    key = ("text", text)
                case ReasoningDelta(text):
                    key = ("reasoning", text)
                case ToolCallDelta(index, text):
                    key = (f"call{index}", text)
                case _:
                    continue
            if joined and joined[-1][0] == key[0]:
                joined[-1] = (key[0], joined[-1][1] + key[1])
            else:
                joined.append(key)
        return joined

    def entries(items: list[Event]) -> int:
        return sum(len(e.entries) for e in items if isinstance(e, LogprobsDelta))

    for merged in (merge(events), merge(merge(events[:cut]) + events[cut:])):
        assert texts(merged) == texts(events)
        assert entries(merged) == entries(events)
        for before, after in itertools.pairwise(merged):
            assert type(before) is not type(after) or (
                isinstance(before, ToolCallDelta)
                and isinstance(after, ToolCallDelta)
                and before.index != after.index
            )
