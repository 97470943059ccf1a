"""The official client library against a real server with the bundled model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import pytest

from kslserve.config import Settings
from tests.server.serving import Server, serving

READ_FILE: Any = {
    "name": "read_file",
    "description": "Read a file",
    "input_schema": {
        "type": "object",
        "properties": {"path": {"type": "string", "description": "path of the file"}},
        "required": ["path"],
    },
}
SUM: Any = [{"role": "user", "content": "What is 2+2?"}]
READ: Any = [{"role": "user", "content": "Read the file src/main.py"}]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
QUIET: Any = {"type": "disabled"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Settings(context=4096, max_seqs=4)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.root, api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def ask(client: anthropic.Anthropic, *, stream: bool, **options: Any) -> anthropic.types.Message:
    options = {"model": "claude-opus-5-5", "max_tokens": 2000, "messages": SUM, **options}
    if not stream:
        message: anthropic.types.Message = client.messages.create(**options)
        return message
    with client.messages.stream(**options) as events:
        return events.get_final_message()


def kinds(message: anthropic.types.Message) -> list[str]:
    return [block.type for block in message.content]


def said(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer(client: anthropic.Anthropic, stream: bool) -> None:
    message = ask(client, stream=stream, thinking=THINK)
    assert message.model == "claude-opus-5-5"
    assert message.id.startswith("msg_")
    assert (message.role, message.stop_reason, message.stop_sequence) == (
        "assistant", "end_turn", None,
    )  # fmt: skip
    thinking, text = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking
    assert thinking.signature
    assert text.type == "text"
    assert "4" in text.text
    assert message.usage.output_tokens > 0
    quiet = ask(client, stream=stream, thinking=QUIET)
    assert kinds(quiet) == ["text"]
    assert "4" in said(quiet)


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    whole = ask(client, stream=False, thinking=THINK).model_dump()
    streamed = ask(client, stream=True, thinking=THINK).model_dump()
    for message in (whole, streamed):
        message.pop("id")
        message.pop("x_kslserve")
        # How much of the prompt was known differs from one request to the next.
        usage = message["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        usage["input_tokens"] += usage.pop("cache_creation_input_tokens")
    assert whole == streamed


@pytest.mark.parametrize("stream", [False, True])
def test_without_a_word_on_thinking_it_is_hidden(client: anthropic.Anthropic, stream: bool) -> None:
    message = ask(client, stream=stream)
    assert kinds(message) == ["text"]
    assert said(message) == said(ask(client, stream=stream, thinking=THINK))
    details: Any = message.usage.output_tokens_details
    assert details.thinking_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [None, THINK, QUIET])
def test_a_tool_call_over_two_turns(
    client: anthropic.Anthropic, stream: bool, thinking: Any
) -> None:
    options: Any = {"tools": [READ_FILE], "stream": stream}
    if thinking is not None:
        options["thinking"] = thinking
    message = ask(client, messages=READ, **options)
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.type == "tool_use"
    assert call.id.startswith("toolu_")
    assert (call.name, call.input) == ("read_file", {"path": "src/main.py"})
    assert ("thinking" in kinds(message)) == (thinking is THINK)
    history = [
        *READ,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": "print('hello')"},
        ]},
    ]  # fmt: skip
    answer = ask(client, messages=history, **options)
    assert answer.stop_reason == "end_turn"
    assert "tool_use" not in kinds(answer)
    assert "hello" in said(answer)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "read_file"}])
def test_a_forced_call(client: anthropic.Anthropic, choice: Any) -> None:
    message = ask(client, stream=False, tools=[READ_FILE], tool_choice=choice, max_tokens=64)
    assert message.stop_reason == "tool_use"
    call = message.content[0]
    assert call.type == "tool_use"
    assert call.name == "read_file"
    assert isinstance(call.input, dict)
    assert call.input.keys() == {"path"}


def test_no_call_where_none_is_allowed(client: anthropic.Anthropic) -> None:
    message = ask(
        client, stream=False, messages=READ, tools=[READ_FILE], tool_choice={"type": "none"},
        max_tokens=40,
    )  # fmt: skip
    assert "tool_use" not in kinds(message)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(client: anthropic.Anthropic, stream: bool) -> None:
    text = said(ask(client, stream=stream, thinking=QUIET))
    stop = text[len(text) // 2 :][:3]
    cut = ask(client, stream=stream, thinking=QUIET, stop_sequences=["never", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert said(cut) == text[: text.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_limits(client: anthropic.Anthropic, stream: bool) -> None:
    message = ask(client, stream=stream, thinking=QUIET, max_tokens=3)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 3
    # More than the window is no error.
    assert ask(client, stream=stream, thinking=QUIET, max_tokens=128_000).stop_reason == "end_turn"


def test_counts(client: anthropic.Anthropic) -> None:
    """A count is what a real request is told, also for 24 at a time and for more than fits."""
    options: Any = {"model": "m", "system": "Short.", "messages": SUM, "tools": [READ_FILE]}
    usage = client.messages.create(**options, max_tokens=1).usage
    real = (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )
    with ThreadPoolExecutor(24) as pool:
        jobs = [pool.submit(client.messages.count_tokens, **options) for _ in range(24)]
        assert {job.result().input_tokens for job in jobs} == {real}
    empty = client.messages.count_tokens(model="m", messages=SUM, tools=[])
    assert 0 < empty.input_tokens < real
    long: Any = [{"role": "user", "content": "word " * 5000}]
    assert client.messages.count_tokens(model="m", messages=long).input_tokens > 4096


@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt(client: anthropic.Anthropic, stream: bool) -> None:
    long: Any = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, stream=stream, messages=long)
    body: Any = caught.value.body
    count = client.messages.count_tokens(model="m", messages=long).input_tokens
    assert body["type"] == "error"
    assert body["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {count} tokens > 4096 maximum",
    }
    assert body["request_id"] == caught.value.request_id


def test_bad_requests(client: anthropic.Anthropic) -> None:
    wrong: Any = [{"role": "user", "content": [{"type": "text", "text": 3}]}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="m", max_tokens=1, messages=wrong)
    assert "messages[0].content[0].text" in str(caught.value)
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.count_tokens(model="m", messages=[])
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"


def test_models(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.type) == ("ksl-nano", "model")
    assert client.models.retrieve("ksl-nano") == model
