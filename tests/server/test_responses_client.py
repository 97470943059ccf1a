"""The Responses dialect: the official client library against a real server with the bundled
model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from kslserve.config import Settings
from tests.server.serving import Server, serving

READ_FILE: Any = {
    "type": "function",
    "name": "read_file",
    "description": "Read a file",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "path of the file"}},
        "required": ["path"],
    },
    "strict": False,
}
SUM = "What is 2+2?"
READ = "Read the file src/main.py"
LIMIT_S = 30
QUIET: Any = {"effort": "none"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Settings(context=4096, max_seqs=4)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, stream: bool, **options: Any) -> Response:
    """A whole response, or the one that the library puts together from a stream."""
    if not stream:
        return client.responses.create(model="m", **options)
    with client.responses.stream(model="m", **options) as events:
        kinds = [event.type for event in events]
        assert kinds[0] == "response.created"
        return events.get_final_response()


def shape(response: Response) -> list[Any]:
    """Its output without ids."""
    items = response.model_dump(mode="json", exclude_none=True)["output"]
    volatile = ("id", "call_id", "parsed_arguments", "parsed")
    return [{key: item[key] for key in item if key not in volatile} for item in items]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer(client: openai.OpenAI, stream: bool) -> None:
    response = ask(client, stream, input=SUM, instructions="Be brief.")
    assert response.status == "completed"
    assert response.model == "m"
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert "4" in response.output_text
    usage = response.usage
    assert usage is not None
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole, streamed = (ask(client, stream, input=SUM) for stream in (False, True))
    assert streamed.output_text == whole.output_text
    assert [item["type"] for item in shape(streamed)] == [item["type"] for item in shape(whole)]
    assert whole.usage is not None
    assert streamed.usage is not None
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("effort", ["none", "medium"])
def test_a_tool_call_over_two_turns(client: openai.OpenAI, stream: bool, effort: Any) -> None:
    options: Any = {"tools": [READ_FILE], "reasoning": {"effort": effort}, "store": False}
    first = ask(client, stream, input=READ, **options)
    kinds = [item.type for item in first.output]
    assert kinds == (["function_call"] if effort == "none" else ["reasoning", "function_call"])
    call = first.output[-1]
    assert call.type == "function_call"
    assert call.call_id.startswith("call_")
    assert call.name == "read_file"
    assert json.loads(call.arguments) == {"path": "src/main.py"}
    history: list[Any] = [
        {"role": "user", "content": READ},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "print('hello')"},
    ]
    second = ask(client, stream, input=history, **options)
    assert second.output[-1].type == "message"
    assert "hello" in second.output_text
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_a_forced_call(client: openai.OpenAI) -> None:
    response = ask(
        client, False, input=SUM, tools=[READ_FILE], max_output_tokens=64,
        tool_choice={"type": "function", "name": "read_file"}, reasoning=QUIET,
    )  # fmt: skip
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments).keys() == {"path"}


def test_a_free_form_call(client: openai.OpenAI) -> None:
    tool: Any = {"type": "custom", "name": "apply_patch", "description": "edit files"}
    with client.responses.create(
        model="m", input="Write a patch", tools=[tool], max_output_tokens=64, stream=True,
        tool_choice={"type": "custom", "name": "apply_patch"},
    ) as events:  # fmt: skip
        seen = list(events)
    deltas = [e.delta for e in seen if e.type == "response.custom_tool_call_input.delta"]
    last = seen[-1]
    assert last.type in ("response.completed", "response.incomplete")
    (call,) = last.response.output
    assert call.type == "custom_tool_call"
    assert call.name == "apply_patch"
    assert call.input == "".join(deltas)


@pytest.mark.parametrize("stream", [False, True])
def test_limits(client: openai.OpenAI, stream: bool) -> None:
    options: Any = {"model": "m", "input": SUM, "max_output_tokens": 3, "reasoning": QUIET}
    if stream:
        with client.responses.create(**options, stream=True) as events:
            *_, last = events
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = client.responses.create(**options)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 3


def test_logprobs(client: openai.OpenAI) -> None:
    response = ask(client, False, input=SUM, top_logprobs=2, reasoning=QUIET)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    entries = part.logprobs
    assert entries
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == part.text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="m", input=SUM, previous_response_id="resp_1")
    assert (caught.value.code, caught.value.param) == (
        "unsupported_parameter",
        "previous_response_id",
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="m", input="word " * 5000, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="m", input=[{"role": "assistant", "content": "x"}])
    assert caught.value.param == "input"


def test_cancellation(server: Server, client: openai.OpenAI) -> None:
    with client.responses.create(
        model="m", input=SUM, stream=True, extra_body={"ignore_eos": True}
    ) as events:
        next(iter(events))
    service = server.app.state.service
    assert service is not None
    end = time.monotonic() + LIMIT_S
    while server.call(lambda: service.live):
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.01)


def test_dropped_items_are_counted(server: Server, client: openai.OpenAI) -> None:
    before = server.metric("input_items_dropped_total")
    response = client.responses.create(
        model="m", reasoning=QUIET, max_output_tokens=1,
        input=[{"role": "user", "content": SUM}, {"type": "item_reference", "id": "x"}],
    )  # fmt: skip
    assert response.status == "incomplete"
    assert server.metric("input_items_dropped_total") == before + 1


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_turn_that_comes_back_is_cached_to_its_end(client: openai.OpenAI, kind: str) -> None:
    """Prompt and answer are the beginning of the next prompt, token for token."""
    facts = " ".join(f"Fact {i} is about item {7 * i}." for i in range(60))
    options: Any = {"instructions": kind + facts, "tools": [READ_FILE], "max_output_tokens": 80}
    choice: Any = "auto"
    if kind == "custom":
        options["tools"] = [{"type": "custom", "name": "apply_patch", "description": "edit files"}]
        choice = {"type": "custom", "name": "apply_patch"}
    first = ask(client, False, input=READ, tool_choice=choice, **options)
    call = first.output[-1]
    assert call.type == "function_call" or call.type == "custom_tool_call"
    result = {"type": f"{call.type}_output", "call_id": call.call_id, "output": "print('hello')"}
    history = [
        {"role": "user", "content": READ},
        *(item.model_dump(exclude_none=True) for item in first.output),
        result,
    ]
    second = ask(client, False, input=history, **options)
    assert first.usage is not None
    assert second.usage is not None
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens + first.usage.output_tokens - 1
    assert cached < second.usage.input_tokens
