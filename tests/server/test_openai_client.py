"""The official client library against a real server with the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from kslserve.config import Settings
from tests.server.serving import Server, serving

READ_FILE: Any = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "path of the file"}},
            "required": ["path"],
        },
    },
}
SUM: Any = [{"role": "user", "content": "What is 2+2?"}]
READ: Any = [{"role": "user", "content": "Read the file src/main.py"}]
QUIET = {"enable_thinking": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Settings(context=4096, max_seqs=4)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def streamed(client: openai.OpenAI, **options: Any) -> tuple[ChatCompletionMessage, str, Any]:
    """(message, finish reason, usage) put together from a stream."""
    fields: dict[str, str] = {"content": "", "reasoning_content": ""}
    calls: dict[int, dict[str, Any]] = {}
    finish = usage = None
    with client.chat.completions.create(
        model="m", stream=True, stream_options={"include_usage": True}, **options
    ) as chunks:
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                for name in fields:
                    fields[name] += getattr(choice.delta, name, None) or ""
                for part in choice.delta.tool_calls or ():
                    call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                    call["id"] += part.id or ""
                    assert part.function is not None
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
    message = ChatCompletionMessage.model_validate(
        {
            "role": "assistant",
            "content": fields["content"] or None,
            "reasoning_content": fields["reasoning_content"],
            "tool_calls": [
                {"id": c["id"], "type": "function",
                 "function": {"name": c["name"], "arguments": c["arguments"]}}
                for c in calls.values()
            ] or None,
        }
    )  # fmt: skip
    assert finish is not None
    return message, finish, usage


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "ksl-nano"
    assert client.models.retrieve("ksl-nano") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="gpt-6.2-sol", messages=SUM)
    (choice,) = answer.choices
    assert answer.model == "gpt-6.2-sol"
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    assert "4" in choice.message.content
    assert choice.message.model_extra is not None
    assert choice.message.model_extra["reasoning_content"]
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("ksl_")
    assert answer._request_id is not None


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=SUM)
    message, finish, usage = streamed(client, messages=SUM)
    assert message.content == whole.choices[0].message.content
    assert message.model_extra == {
        "reasoning_content": whole.choices[0].message.model_extra["reasoning_content"]  # type: ignore[index]
    }
    assert finish == whole.choices[0].finish_reason
    assert usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
def test_a_tool_call_over_two_turns(client: openai.OpenAI, stream: bool, thinking: bool) -> None:
    def ask(messages: Any) -> tuple[ChatCompletionMessage, str]:
        options: Any = {
            "messages": messages,
            "tools": [READ_FILE],
            "extra_body": {"enable_thinking": thinking},
        }
        if stream:
            return streamed(client, **options)[:2]
        choice = client.chat.completions.create(model="m", **options).choices[0]
        return choice.message, choice.finish_reason

    message, finish = ask(READ)
    assert finish == "tool_calls"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "read_file"
    assert json.loads(call.function.arguments) == {"path": "src/main.py"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "print('hello')"}
    message, finish = ask([*READ, message.model_dump(exclude_none=True), result])
    assert finish == "stop"
    assert not message.tool_calls
    assert "hello" in (message.content or "")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "read_file"}}]
)
def test_a_forced_call(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="m", messages=SUM, tools=[READ_FILE], tool_choice=choice, max_tokens=64
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    first = message.tool_calls[0]
    assert first.type == "function"
    assert first.function.name == "read_file"
    assert json.loads(first.function.arguments).keys() == {"path"}


def test_no_call_where_none_is_allowed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=READ, tools=[READ_FILE], tool_choice="none", max_tokens=40
    )
    assert answer.choices[0].message.tool_calls is None


def test_logprobs(client: openai.OpenAI) -> None:
    options: Any = {"model": "m", "messages": SUM, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**options, extra_body=QUIET)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries
    assert b"".join(bytes(e.bytes or []) for e in entries).decode() == choice.message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.logprob
    parts = []
    with client.chat.completions.create(**options, stream=True, extra_body=QUIET) as chunks:
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].logprobs:
                parts += chunk.choices[0].logprobs.content or []
    assert parts == entries


def test_stop_strings(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=SUM, extra_body=QUIET)
    text = whole.choices[0].message.content or ""
    stop = text[len(text) // 2 :][:3]
    cut = client.chat.completions.create(model="m", messages=SUM, stop=stop, extra_body=QUIET)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == text[: text.index(stop)]
    message, finish, _ = streamed(client, messages=SUM, stop=[stop], extra_body=QUIET)
    assert (message.content, finish) == (text[: text.index(stop)], "stop")


def test_limits(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=SUM, max_completion_tokens=3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    def ask(seed: int | None) -> Any:
        options: Any = {} if seed is None else {"seed": seed}
        return client.chat.completions.create(
            model="m", messages=SUM, temperature=2.0, max_tokens=24, extra_body=QUIET, **options
        )

    first = ask(11)
    assert first.choices[0].message.content == ask(11).choices[0].message.content
    assert first.model_extra["x_kslserve"] == {"seed": 11}
    free = ask(None)
    seed = free.model_extra["x_kslserve"]["seed"]
    assert ask(seed).choices[0].message.content == free.choices[0].message.content


def test_too_long_a_prompt(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "word " * 5000}], stream=True
        )
    assert caught.value.code == "context_length_exceeded"
    body: Any = caught.value.body
    n = int(body["message"].split("resulted in ")[1].split()[0])
    assert n > 4096
    assert body["message"] == (
        "This model's maximum context length is 4096 tokens. However, your messages resulted in "
        f"{n} tokens. The prompt is too long: {n} tokens > 4096 maximum."
    )


def test_bad_requests(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=SUM, n=2)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "n")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=SUM, logit_bias={"99999": 1})
    assert caught.value.param == "logit_bias"


def test_logit_bias_and_ignore_eos(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="m", messages=SUM, max_tokens=4, extra_body=QUIET, logit_bias={"100": 100}
    )
    whole = client.chat.completions.create(
        model="m", messages=SUM, max_tokens=200, extra_body={**QUIET, "ignore_eos": True}
    )
    assert answer.choices[0].message.content != whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 200
    assert whole.choices[0].finish_reason == "length"
