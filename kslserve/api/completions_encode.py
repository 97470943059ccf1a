"""Events of text completions -> bytes of a Completions answer, streamed (CompletionsEncoder) or
whole (CompletionsCollector)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from kslserve.api import dialect
from kslserve.api.chat_encode import DONE, FINISH, usage_object
from kslserve.core.events import (
    CompletionDelta,
    CompletionEnd,
    Event,
    Failed,
    Finished,
    ScoredToken,
    Started,
)
from kslserve.core.usage import Usage
from kslserve.errors import KslError
from kslserve.http.sse import frame

_LEAST = -9999.0  # JSON has no infinity


def token_text(token: bytes) -> str:
    """A token as text; one that is no text by itself as `bytes:` and its bytes in hexadecimal, so
    that different tokens never look alike."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def logprobs_object(scores: Iterable[ScoredToken]) -> dict[str, Any]:
    scores = tuple(scores)
    return {
        "tokens": [token_text(score.token) for score in scores],
        "token_logprobs": [
            None if score.logprob is None else max(score.logprob, _LEAST) for score in scores
        ],
        "top_logprobs": [
            None
            if score.logprob is None
            else {token_text(token): max(value, _LEAST) for token, value in score.top}
            for score in scores
        ],
        "text_offset": [score.offset for score in scores],
    }


class _Answer:
    """What stream and body have in common."""

    def __init__(self, model: str, fingerprint: str, *, logprobs: bool, return_ids: bool) -> None:
        self._head = {
            "id": "cmpl-" + uuid.uuid4().hex,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._seed: int | None = None
        self._logprobs = logprobs
        self._return_ids = return_ids

    def attach(self, seed: int, usage: Usage) -> None:
        self._seed = seed

    def _choice(
        self, index: int, deltas: Sequence[CompletionDelta], end: CompletionEnd | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._logprobs:
            logprobs = logprobs_object(score for delta in deltas for score in delta.scores)
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(delta.text for delta in deltas),
            "logprobs": logprobs,
            "finish_reason": None if end is None else FINISH[end.reason],
        }
        if self._return_ids:
            for name, prompt in (("prompt_token_ids", True), ("token_ids", False)):
                choice[name] = [
                    token for delta in deltas if delta.prompt is prompt for token in delta.ids
                ]
        return choice

    def _extension(self, usage: Usage) -> dict[str, Any]:
        return {"x_kslserve": dialect.extension(self._seed, usage)}


class CompletionsEncoder(_Answer):
    """The stream of one response: `data:` frames, choices by index, `[DONE]`."""

    def __init__(
        self,
        model: str,
        fingerprint: str,
        *,
        include_usage: bool,
        logprobs: bool,
        return_ids: bool,
    ) -> None:
        super().__init__(model, fingerprint, logprobs=logprobs, return_ids=return_ids)
        self._include_usage = include_usage
        self._begun = False

    def encode(self, events: Sequence[Event]) -> bytes:
        """The frames of one batch. The deltas of a choice in one batch are one frame."""
        frames: list[bytes] = []
        deltas: dict[int, list[CompletionDelta]] = {}
        for event in events:
            match event:
                case CompletionDelta(index):
                    deltas.setdefault(index, []).append(event)
                case CompletionEnd(index):
                    frames.append(self._chunk(self._choice(index, deltas.pop(index, []), event)))
                case Started():
                    # The head may have gone out earlier, as a first sign of life.
                    if not self._begun:
                        self._begun = True
                        frames.append(self.heartbeat())
        frames += [self._chunk(self._choice(i, found, None)) for i, found in deltas.items()]
        if isinstance(events[-1], Finished):
            frames.append(self._finish(events[-1]))
        return b"".join(frames)

    def heartbeat(self) -> bytes:
        """A chunk without text: clients count it as progress, unlike a comment line."""
        return self._chunk({"index": 0, "text": "", "logprobs": None, "finish_reason": None})

    def error(self, error: KslError) -> bytes:
        return frame(dialect.error_body(error))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return frame(orjson.dumps({**self._head, "choices": [choice]}))

    def _finish(self, event: Finished) -> bytes:
        if not (self._include_usage or event.usage.statistics):
            return DONE
        counts = {
            **self._head,
            "choices": [],
            "usage": usage_object(event.usage) if self._include_usage else None,
            **self._extension(event.usage),
        }
        return frame(orjson.dumps(counts)) + DONE


class CompletionsCollector(_Answer):
    """Folds the events of one response into its one body. choices: how many there are."""

    def __init__(
        self, model: str, fingerprint: str, choices: int, *, logprobs: bool, return_ids: bool
    ) -> None:
        super().__init__(model, fingerprint, logprobs=logprobs, return_ids=return_ids)
        self._deltas: list[list[CompletionDelta]] = [[] for _ in range(choices)]
        self._ends: list[CompletionEnd | None] = [None] * choices

    def fold(self, events: Sequence[Event]) -> Finished | Failed | None:
        """Take a batch; returns its terminal event, if there is one."""
        for event in events:
            match event:
                case CompletionDelta(index):
                    self._deltas[index].append(event)
                case CompletionEnd(index):
                    self._ends[index] = event
                case Finished() | Failed():
                    return event
        return None

    def body(self, finished: Finished) -> bytes:
        choices = [
            self._choice(index, deltas, end)
            for index, (deltas, end) in enumerate(zip(self._deltas, self._ends, strict=True))
        ]
        return orjson.dumps(
            {
                **self._head,
                "choices": choices,
                "usage": usage_object(finished.usage),
                **self._extension(finished.usage),
            }
        )
