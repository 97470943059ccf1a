"""One text completion: a prompt and its continuation, as the scheduler's sink.

ids -> text (incremental UTF-8) -> stop strings -> events. With `echo` the prompt comes back as the
first piece; with log-probabilities every token of it is scored by the rows that compute it.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kslserve.core.events import CompletionDelta, CompletionEnd, Event, ScoredToken
from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason, Usage
from kslserve.engine.types import Ids
from kslserve.errors import KslError
from kslserve.parse.stops import StopMatcher
from kslserve.sched.sequence import Sequence as Timeline
from kslserve.text.detokenizer import Detokenizer
from kslserve.text.tokenizer import Tokenizer

Scores = Sequence[Sequence[tuple[int, float]]]
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """prompts: texts or token ids, below 2**31. max_tokens: of each output, 0 for none. echo: give
    the prompt back, with its scores where sampling.logprobs asks for them."""

    prompts: tuple[Prompt, ...]
    max_tokens: int
    sampling: SamplingParams
    echo: bool = False
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    statistics: bool = False


class Owner(Protocol):
    """What a completion tells of itself. usage: of all completions of the request."""

    @property
    def usage(self) -> Usage: ...
    def began(self, cached_tokens: int) -> None: ...
    def say(self, events: list[Event]) -> None: ...
    def over(self, completion: Completion, events: list[Event]) -> None: ...


class Completion:
    """One prompt and its continuation: the scheduler's sink.

    A request for no tokens at all samples one and drops it, since computing the last position of
    the prompt is what ends every prompt."""

    def __init__(
        self,
        owner: Owner,
        tokenizer: Tokenizer,
        options: CompletionOptions,
        index: int,
        text: str | None,
        ids: Ids,
    ) -> None:
        self.max_new_tokens = max(options.max_tokens, 1)
        self.created_at = time.monotonic()
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.reason: FinishReason | None = None
        self.error: KslError | None = None
        self.sequence: Timeline | None = None
        self._owner = owner
        self._tokenizer = tokenizer
        self._index = index
        self._text = text
        self._ids = ids
        self._silent = options.max_tokens == 0
        self._echo = options.echo
        self._logprobs = options.sampling.logprobs is not None
        self._scores: list[Sequence[tuple[int, float]]] = []  # of prompt positions from the second
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(options.stop) if options.stop else None
        self._offset = 0  # characters so far, held ones included
        self._cancel: Callable[[KslError | None], None] | None = None

    def attach(self, cancel: Callable[[KslError | None], None]) -> None:
        self._cancel = cancel

    def cancel(self, error: KslError | None = None) -> None:
        if self.ended_at is None and self._cancel is not None:
            self._cancel(error)

    # ------------------------------------------------------------ sink

    def admitted(self, cached_tokens: int = 0) -> None:
        self.admitted_at = time.monotonic()
        self._owner.began(cached_tokens)

    def tokens(self, ids: Sequence[int], logprobs: Scores | None) -> None:
        """Sampled ids, a stop id included; or no ids and the scores of prompt positions."""
        if self.ended_at is not None:
            return
        if not ids:
            self._scores += logprobs or ()
            return
        events: list[Event] = []
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
            if self._echo:
                events.append(self._prompt())
        if self._silent:
            self._stop_here(events, FinishReason.LENGTH, None)
            return
        delta, matched = self._continue(ids, logprobs)
        self._owner.usage.completion_tokens += len(delta.ids)
        events.append(delta)
        if matched is not None:
            self._stop_here(events, FinishReason.STOP_STRING, matched)
        else:
            self._owner.say(events)

    def ended(self, reason: FinishReason, error: KslError | None) -> None:
        if self.ended_at is not None:
            return
        events: list[Event] = []
        stop_string = None
        if error is None:
            text = self._detokenizer.flush()
            if self._stops is not None:
                text, stop_string = self._stops.feed(text)
                text += self._stops.flush()
            if text:
                events.append(CompletionDelta(self._index, text))
            if stop_string is not None:
                reason = FinishReason.STOP_STRING
        self._close(events, reason, error, stop_string)

    # ------------------------------------------------------------ helpers

    def _prompt(self) -> CompletionDelta:
        """The prompt repeated: the text as sent, or that of its ids, control tokens included."""
        tokens = [self._tokenizer.token_bytes(int(token)) for token in self._ids]
        text = b"".join(tokens).decode("utf-8", "replace") if self._text is None else self._text
        scores = []
        if self._logprobs:
            decode = codecs.getincrementaldecoder("utf-8")("replace").decode
            offset = 0
            for at, token in enumerate(tokens):
                scored = self._scores[at - 1] if at else ()
                scores.append(self._scored(int(self._ids[at]), scored, offset))
                offset += len(decode(token))
        self._offset = len(text)
        return CompletionDelta(
            self._index, text, tuple(self._ids.tolist()), tuple(scores), prompt=True
        )

    def _continue(
        self, ids: Sequence[int], logprobs: Scores | None
    ) -> tuple[CompletionDelta, str | None]:
        """The piece that sampled ids add, up to a stop string, and that string."""
        text, matched, used = "", None, 0
        scores = []
        for at, token in enumerate(ids):
            if logprobs is not None:
                scores.append(self._scored(token, logprobs[at], self._offset))
            piece = self._detokenizer.feed((token,))
            self._offset += len(piece)
            if self._stops is not None and piece:
                piece, matched = self._stops.feed(piece)
            text += piece
            used += 1
            if matched is not None:
                break
        return CompletionDelta(self._index, text, tuple(ids[:used]), tuple(scores)), matched

    def _scored(self, token: int, scored: Sequence[tuple[int, float]], offset: int) -> ScoredToken:
        """scored: the token itself, then the most likely ones; empty at the first position."""
        name = self._name
        if not scored:
            return ScoredToken(name(token), None, offset)
        (_, logprob), *top = scored
        best = dict((*top, scored[0]))
        return ScoredToken(
            name(token), logprob, offset, tuple((name(t), value) for t, value in best.items())
        )

    def _name(self, token: int) -> bytes:
        """Bytes of a token; the id in words where the model has no texts."""
        return self._tokenizer.token_bytes(token) or b"token_id:%d" % token

    def _stop_here(
        self, events: list[Event], reason: FinishReason, stop_string: str | None
    ) -> None:
        """End before the model does; the scheduler hears of it as a cancellation."""
        cancel = self._cancel
        self._close(events, reason, None, stop_string)
        if cancel is not None:
            cancel(None)

    def _close(
        self,
        events: list[Event],
        reason: FinishReason,
        error: KslError | None,
        stop_string: str | None,
    ) -> None:
        self.ended_at = time.monotonic()
        self.reason = reason
        self.error = error
        if error is None:
            events.append(CompletionEnd(self._index, reason, stop_string))
        self._owner.over(self, events)
