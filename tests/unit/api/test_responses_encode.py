"""core.Events -> a Responses answer. Every event is parsed by the official library's types."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve import errors
from kslserve.api.dialect import closes_stream, error_body
from kslserve.api.responses_encode import ResponsesEncoder
from kslserve.api.responses_reasoning import unseal
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
from kslserve.errors import ContextLengthExceeded, EngineError, InvalidRequest, KslError
from tests.unit.api.responses_support import (
    AGENTS,
    LS,
    PATCH,
    SEARCH,
    collect,
    frames,
    parse,
    stream,
)

USAGE = Usage(prompt_tokens=9, cached_tokens=8, completion_tokens=5, reasoning_tokens=3)
STOP = Finished(FinishReason.STOP, USAGE)
CALLS = Finished(FinishReason.TOOL_CALLS, USAGE)


def call(name: str, *pieces: str, call_id: str = "call_1", index: int = 0) -> list[Event]:
    deltas = [ToolCallDelta(index, piece) for piece in pieces]
    return [ToolCallStart(index, call_id, name), *deltas, ToolCallEnd(index)]


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def done_items(events: list[dict[str, Any]]) -> list[Any]:
    return [e["item"] for e in events if e["type"] == "response.output_item.done"]


SCRIPT: list[list[Event]] = [
    [Started()],
    [ReasoningDelta("because\n")],
    [ReasoningDelta("so"), TextDelta("Hé")],
    [TextDelta('"llo')],
    call("ls", '{"path": ', '"a"}'),
    [*call("ls", "{}", call_id="call_2", index=1), CALLS],
]


def test_the_order_of_events() -> None:
    events = stream(SCRIPT, tools=[LS])
    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    first, last = events[0]["response"], events[-1]["response"]
    assert first["status"] == "in_progress"
    assert first["output"] == []
    assert first["usage"] is None
    assert last["status"] == "completed"
    assert last["id"] == first["id"]
    assert last["id"].startswith("resp_")
    assert last["output"] == done_items(events)
    assert last["x_kslserve"] == {"seed": 42}
    assert last["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 14,
    }


def test_items() -> None:
    reasoning, message, first, second = stream(SCRIPT, tools=[LS])[-1]["response"]["output"]
    assert reasoning["id"].startswith("rs_")
    assert reasoning["summary"] == [{"type": "summary_text", "text": "because\nso"}]
    assert unseal(reasoning["encrypted_content"]) == "because\nso"
    assert message["content"] == [
        {"type": "output_text", "text": 'Hé"llo', "annotations": [], "logprobs": []}
    ]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["id"].startswith("msg_")
    assert first["id"].startswith("fc_")
    assert {key: first[key] for key in first if key != "id"} == {
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "ls",
        "arguments": '{"path": "a"}',
    }
    assert (second["call_id"], second["arguments"]) == ("call_2", "{}")


def test_every_event_names_its_item_and_place() -> None:
    events = stream(SCRIPT, tools=[LS])
    added = {e["item"]["id"]: e["output_index"] for e in events if "output_item.added" in e["type"]}
    assert list(added.values()) == [0, 1, 2, 3]
    for event in events:
        if "item_id" in event:
            assert added[event["item_id"]] == event["output_index"]
        elif "item" in event:
            assert added[event["item"]["id"]] == event["output_index"]


def test_the_end_of_an_item_repeats_it() -> None:
    events = stream(SCRIPT, tools=[LS])
    by_id = {item["id"]: item for item in events[-1]["response"]["output"]}
    ends = [e for e in events if e["type"].endswith(".done") and "item_id" in e]
    assert len(ends) == 6
    for event in ends:
        item = by_id[event["item_id"]]
        if "arguments" in event:
            assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
        else:
            (part,) = item.get("content") or item["summary"]
            assert event.get("text", part["text"]) == part["text"]
            assert event.get("part", part) == part


def test_the_whole_body_is_the_end_of_the_stream() -> None:
    def known(value: Any) -> Any:
        if isinstance(value, dict):
            volatile = ("id", "created_at", "completed_at")
            return {k: known(v) for k, v in value.items() if k not in volatile}
        return [known(item) for item in value] if isinstance(value, list) else value

    fields = {"tools": [LS], "instructions": "x", "metadata": {"a": "b"}}
    whole = collect(SCRIPT, **fields)
    assert known(whole) == known(stream(SCRIPT, **fields)[-1]["response"])


def test_the_response_repeats_the_request() -> None:
    body = collect(
        [[Started(), TextDelta("x"), STOP]],
        tools=[LS, PATCH, {"type": "web_search", "external_web_access": True}, AGENTS, SEARCH],
        instructions="be brief",
        temperature=0.5,
        max_output_tokens=99,
        parallel_tool_calls=False,
        tool_choice={"type": "function", "name": "ls"},
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        prompt_cache_key="k",
        store=True,
    )
    assert body["object"] == "response"
    assert body["model"] == "m"
    assert body["tools"][0] == LS
    assert body["tools"][3] == AGENTS
    assert body["tool_choice"] == {"type": "function", "name": "ls"}
    assert (body["temperature"], body["top_p"]) == (0.5, 0.9)
    assert body["max_output_tokens"] == 99
    assert body["instructions"] == "be brief"
    assert body["reasoning"] == {"effort": "low", "summary": None}
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert body["prompt_cache_key"] == "k"
    assert body["parallel_tool_calls"] is False
    assert body["store"] is False
    for name in ("error", "incomplete_details", "previous_response_id"):
        assert body[name] is None
    assert collect([[STOP]])["output"] == []


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.STOP, "completed"),
        (FinishReason.STOP_STRING, "completed"),
        (FinishReason.TOOL_CALLS, "completed"),
        (FinishReason.LENGTH, "incomplete"),
        (FinishReason.WINDOW, "incomplete"),
    ],
)
def test_ends(reason: FinishReason, status: str) -> None:
    batches: list[list[Event]] = [[Started(), TextDelta("x"), Finished(reason, USAGE)]]
    last = stream(batches)[-1]
    assert last["type"] == f"response.{status}"
    assert last["response"]["status"] == status
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    assert last["response"]["incomplete_details"] == cut
    assert last["response"]["output"][0]["status"] == status
    assert collect(batches)["status"] == status


def test_a_call_that_was_cut_off() -> None:
    cut: list[Event] = [ToolCallStart(0, "call_1", "ls"), ToolCallDelta(0, '{"path": "a')]
    events = stream([[Started()], [*cut, Finished(FinishReason.LENGTH, USAGE)]], tools=[LS])
    item = events[-1]["response"]["output"][0]
    assert (item["status"], item["arguments"]) == ("incomplete", '{"path": "a')
    assert done_items(events) == [item]


def test_free_form_calls() -> None:
    events = stream(
        [[Started()], call("apply_patch", '{"input": "*** B', "egin\\n+x", '"}'), [CALLS]],
        tools=[PATCH],
    )
    assert types(events)[2:] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    item = events[-1]["response"]["output"][0]
    assert item["id"].startswith("ctc_")
    assert events[2]["item"]["input"] == ""
    assert events[3]["delta"] == events[4]["input"] == item["input"] == "*** Begin\n+x"
    assert (item["type"], item["name"]) == ("custom_tool_call", "apply_patch")
    assert item["call_id"] == "call_1"
    other = collect([[Started()], call("apply_patch", '{"patch": "p"}'), [CALLS]], tools=[PATCH])
    assert other["output"][0]["input"] == "p"


def test_calls_of_a_namespace_say_so() -> None:
    again = {**AGENTS, "name": "again", "tools": [*AGENTS["tools"], {**PATCH, "name": "exec"}]}
    tools = [AGENTS, again]
    events = stream(
        [
            [Started()],
            call("agents.spawn", "{}"),
            call("exec", '{"input": "x"}'),
            call("unheard_of", "{}"),
            [CALLS],
        ],
        tools=tools,
    )
    spawn, execute, other = events[-1]["response"]["output"]
    assert (spawn["name"], spawn["namespace"]) == ("spawn", "agents")
    assert (execute["name"], execute["namespace"]) == ("exec", "again")
    assert execute["type"] == "custom_tool_call"
    assert other["name"] == "unheard_of"
    assert "namespace" not in other
    assert events[2]["item"]["namespace"] == "agents"


def test_tool_search_calls() -> None:
    events = stream(
        [[Started()], call("tool_search", '{"query": ', '"q"}'), [CALLS]], tools=[SEARCH]
    )
    assert types(events)[2:] == ["output_item.added", "output_item.done", "completed"]
    item = events[-1]["response"]["output"][0]
    assert {key: item[key] for key in item if key != "id"} == {
        "type": "tool_search_call",
        "status": "completed",
        "call_id": "call_1",
        "execution": "client",
        "arguments": {"query": "q"},
    }
    cut: list[Event] = [ToolCallStart(0, "c", "tool_search"), ToolCallDelta(0, '{"que')]
    body = collect([[*cut, Finished(FinishReason.LENGTH, USAGE)]], tools=[SEARCH])
    assert body["output"][0]["arguments"] == {}


def entry(token: bytes) -> LogprobsDelta:
    return LogprobsDelta((TokenLogprob(token, 7, -0.5, ((b"\xff", 8, -1.0),)),))


def test_logprobs_go_with_their_text() -> None:
    batches: list[list[Event]] = [
        [Started(), entry(b"a"), TextDelta("a")],
        [entry(b"b"), TextDelta("b"), entry(b"c")],
        [STOP],
    ]
    events = stream(batches, top_logprobs=1)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    found = [[t["token"] for t in e["logprobs"]] for e in deltas]
    assert [*itertools.chain(*found)] == ["a", "b", "c"]
    assert found[0] == ["a"]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert [t["token"] for t in part["logprobs"]] == ["a", "b", "c"]
    assert part["logprobs"][0]["top_logprobs"][0]["bytes"] == [255]
    assert events[-1]["response"]["top_logprobs"] == 1
    quiet = stream(batches)
    assert all(not e.get("logprobs") for e in quiet)
    before_call: list[list[Event]] = [[Started(), entry(b"<")], call("ls", "{}"), [STOP]]
    assert len(collect(before_call, top_logprobs=1, tools=[LS])["output"]) == 1


def test_the_head_goes_out_once() -> None:
    encoder = ResponsesEncoder(parse())
    assert types(frames(encoder.encode([Started()]))) == ["created", "in_progress"]
    assert encoder.encode([Started()]) == b""
    beat = frames(encoder.heartbeat())
    assert types(beat) == ["in_progress"]
    assert beat[0]["sequence_number"] == 2
    assert beat[0]["response"]["status"] == "in_progress"
    rest = frames(encoder.encode([TextDelta("x"), STOP]))
    assert rest[0]["sequence_number"] == 3


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("boom."), "server_error"),
        (KslError("boom."), "server_error"),
        (InvalidRequest("bad."), "invalid_prompt"),
        (ContextLengthExceeded(9, 8), "context_length_exceeded"),
    ],
)
def test_failures(error: KslError, code: str) -> None:
    encoder = ResponsesEncoder(parse())
    data = encoder.encode([Started()]) + encoder.encode([TextDelta("x"), ReasoningDelta("y")])
    assert encoder.encode([Failed(error, USAGE)]) == b""
    end = encoder.error(error)
    kind, _, body = end.decode().partition("\n")
    failed = json.loads(body.removeprefix("data: "))
    assert kind == "event: response.failed"
    assert failed["sequence_number"] == len(frames(data))
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": str(error)}
    assert [item["type"] for item in failed["response"]["output"]] == ["message"]


FAULTS = [
    kind(9, 8) if kind is ContextLengthExceeded else kind("x")
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, KslError)
]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_no_fault_is_a_server_that_is_overloaded(error: KslError) -> None:
    """`server_is_overloaded` ends the task of a client that would have tried again."""
    data = ResponsesEncoder(parse()).error(error).decode().partition("\ndata: ")[2]
    told = json.loads(data)["response"]["error"]["code"]
    assert told in ("server_error", "invalid_prompt", "context_length_exceeded")
    assert json.loads(error_body(error))["error"]["code"] != "server_is_overloaded"
    assert closes_stream(error) or error.status not in (429, 503, 504)


TEXTS = st.text(max_size=4)
CHUNKS = st.lists(
    st.builds(TextDelta, TEXTS)
    | st.builds(ReasoningDelta, TEXTS)
    | st.sampled_from(["ls", "apply_patch", "tool_search", "spawn"]),
    max_size=8,
)


@given(CHUNKS, st.lists(st.integers(0, 40)), st.booleans())
def test_any_events_in_any_batches(chunks: list[Any], cuts: list[int], cut_off: bool) -> None:
    events: list[Event] = [Started()]
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, str):
            events += call(chunk, '{"input": ', '"x\\n', '"}', call_id=f"c{index}", index=index)
        else:
            events.append(chunk)
    if cut_off and isinstance(events[-1], ToolCallEnd):
        events.pop()
    events.append(Finished(FinishReason.LENGTH if cut_off else FinishReason.STOP, USAGE))
    ends = sorted({cut % len(events) for cut in cuts} | {len(events)} - {0})
    batches = [events[a:b] for a, b in zip([0, *ends], ends, strict=False) if a < b]
    sent = stream(batches, tools=[LS, PATCH, SEARCH, AGENTS])
    final = sent[-1]["response"]
    assert final["output"] == done_items(sent)
    texts = {
        "response.output_text.delta": "".join(
            part["text"] for item in final["output"] for part in item.get("content", ())
        ),
        "response.reasoning_summary_text.delta": "".join(
            part["text"] for item in final["output"] for part in item.get("summary", ())
        ),
        "response.custom_tool_call_input.delta": "".join(
            item.get("input", "") for item in final["output"]
        ),
    }
    for kind, text in texts.items():
        assert "".join(e["delta"] for e in sent if e["type"] == kind) == text
