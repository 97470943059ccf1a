"""Events of text completions -> a Completions answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion

from kslserve.api.completions_encode import CompletionsCollector, CompletionsEncoder, token_text
from kslserve.core.events import (
    CompletionDelta,
    CompletionEnd,
    Event,
    Failed,
    Finished,
    ScoredToken,
    Started,
)
from kslserve.core.usage import FinishReason, Usage
from kslserve.errors import KslError

USAGE = Usage(prompt_tokens=9, completion_tokens=5)
FIRST = ScoredToken(b"Hi", None, 0)
SECOND = ScoredToken(b"\xff", float("-inf"), 2, ((b" you", -0.25), (b"\xff", float("-inf"))))
SCRIPT: list[list[Event]] = [
    [Started()],
    [CompletionDelta(1, "b", (7,)), CompletionDelta(0, "Hi", (1,), (FIRST,), prompt=True)],
    [CompletionDelta(0, "\ufffd", (2,), (SECOND,)), CompletionDelta(0, "!", (3,))],
    [CompletionEnd(1, FinishReason.STOP)],
    [CompletionDelta(0, ".", (4,)), CompletionEnd(0, FinishReason.LENGTH),
     Finished(FinishReason.STOP, USAGE)],
]  # fmt: skip


def stream(*, include_usage: bool = False, **options: Any) -> list[dict[str, Any]]:
    options = {"logprobs": False, "return_ids": False, **options}
    encoder = CompletionsEncoder("m", "fp", include_usage=include_usage, **options)
    encoder.attach(42, USAGE)
    data = b"".join(encoder.encode(batch) for batch in SCRIPT).decode()
    frames = data.removesuffix("\n\n").split("\n\n")
    assert frames.pop() == "data: [DONE]"
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    for chunk in chunks:
        Completion.model_validate({**chunk, "choices": []})
        assert chunk["object"] == "text_completion"
        assert chunk["id"] == chunks[0]["id"]
    return chunks


def collect(**options: Any) -> dict[str, Any]:
    options = {"logprobs": False, "return_ids": False, **options}
    collector = CompletionsCollector("m", "fp", 2, **options)
    collector.attach(42, USAGE)
    for batch in SCRIPT:
        terminal = collector.fold(batch)
    assert isinstance(terminal, Finished)
    body = json.loads(collector.body(terminal))
    if not options["logprobs"]:  # the types do not know the null of a first token
        Completion.model_validate(body)
    return body


def test_the_stream() -> None:
    chunks = stream(include_usage=True)
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 14
    assert usage["x_kslserve"] == {"seed": 42}
    found = [
        (c["index"], c["text"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"]
    ]
    assert found == [
        (0, "", None), (1, "b", None), (0, "Hi", None), (0, "\ufffd!", None), (1, "", "stop"),
        (0, ".", "length"),
    ]  # fmt: skip
    assert all("usage" not in chunk for chunk in stream())


def test_the_body() -> None:
    body = collect()
    assert body["object"] == "text_completion"
    assert (body["model"], body["system_fingerprint"]) == ("m", "fp")
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hi\ufffd!.", "logprobs": None, "finish_reason": "length"},
        {"index": 1, "text": "b", "logprobs": None, "finish_reason": "stop"},
    ]
    assert body["usage"]["prompt_tokens"] == 9


def test_logprobs() -> None:
    expected = {
        "tokens": ["Hi", "bytes:\\xff"],
        "token_logprobs": [None, -9999.0],
        "top_logprobs": [None, {" you": -0.25, "bytes:\\xff": -9999.0}],
        "text_offset": [0, 2],
    }
    assert collect(logprobs=True)["choices"][0]["logprobs"] == expected
    joined: dict[str, list[Any]] = {key: [] for key in expected}
    for chunk in stream(logprobs=True):
        choice = chunk["choices"][0]
        if choice["index"] == 0 and choice["logprobs"]:
            for key, values in choice["logprobs"].items():
                joined[key] += values
    assert joined == expected


def test_token_ids() -> None:
    first, second = collect(return_ids=True)["choices"]
    assert (first["prompt_token_ids"], first["token_ids"]) == ([1], [2, 3, 4])
    assert (second["prompt_token_ids"], second["token_ids"]) == ([], [7])
    assert "token_ids" not in collect()["choices"][0]


@pytest.mark.parametrize(
    ("token", "text"), [(b"a", "a"), (b"", ""), ("é".encode(), "é"), (b"\xc3", "bytes:\\xc3")]
)
def test_tokens_as_text(token: bytes, text: str) -> None:
    assert token_text(token) == text


def test_head_heartbeat_and_error() -> None:
    encoder = CompletionsEncoder("m", "f", include_usage=False, logprobs=False, return_ids=False)
    head = encoder.encode([Started()])
    assert encoder.encode([Started()]) == b""
    assert encoder.heartbeat() == head
    error = KslError("boom.")
    assert encoder.encode([Failed(error, USAGE)]) == b""
    assert json.loads(encoder.error(error).decode().removeprefix("data: "))["error"]["message"] == (
        "boom."
    )
    collector = CompletionsCollector("m", "f", 1, logprobs=False, return_ids=False)
    assert collector.fold([Failed(error, USAGE)]) == Failed(error, USAGE)
