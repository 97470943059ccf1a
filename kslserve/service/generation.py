"""One live generation: the scheduler's sink. Sampled ids in, core.Events out, one batch per wave.

ids -> text (incremental UTF-8) -> parser (reasoning, text, calls) -> stop strings -> on_events.
Stop strings apply to the visible text only: never to reasoning or to tool calls, whose content the
client did not write for display. Everything runs on the event loop; nothing here blocks or awaits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kslserve.core.events import (
    Event,
    Failed,
    Finished,
    LogprobsDelta,
    Started,
    TokenLogprob,
)
from kslserve.core.usage import FinishReason, Statistics, Usage
from kslserve.engine.types import Ids
from kslserve.errors import KslError
from kslserve.parse.stream import OutputParser
from kslserve.service.cut import Cut
from kslserve.service.echo import Turn
from kslserve.service.turnlog import TurnLog
from kslserve.text.detokenizer import Detokenizer
from kslserve.text.tokenizer import Tokenizer

OnEvents = Callable[[list[Event]], None]
Entries = list[list[tuple[int, float]]]


class Generation:
    """Times are of time.monotonic(); None until they happened. `error` is set when it failed.

    usage is complete once `ended_at` is set. After the terminal event (Finished or Failed)
    on_events is not called again. on_text: may be set to be called, in place of on_events, with a
    piece of visible text: nearly every token is one. written: may be set to tell how many tokens of
    the prompt went into the prefix cache.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        parser: OutputParser,
        stops: Sequence[str],
        on_events: OnEvents,
        prompt_tokens: int,
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        seed: int,
        one_call: bool = False,
        opening: str = "",
        on_ended: Callable[[Generation], None] | None = None,
        turn_head: Ids | None = None,
        on_turn: Callable[[Turn], None] | None = None,
    ) -> None:
        """one_call: the generation ends with its first complete tool call. opening: forced output
        that the prompt already holds; it is parsed as if the model had written it, and not
        counted. turn_head: int32, the prompt's ids from the start of the turn on; on_turn: who
        hears of the turn when its client has got all of it."""
        self.seed = seed
        self.usage = Usage(prompt_tokens=prompt_tokens)
        self.created_at = time.monotonic()
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        self.reason: FinishReason | None = None
        self.error: KslError | None = None
        self.on_text: Callable[[str], None] | None = None
        self.statistics: Callable[[], Statistics] | None = None
        self.written: Callable[[], int] | None = None
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._parser = parser
        self._cut = Cut(stops, one_call)
        self._client = on_events
        self._turn = TurnLog(tokenizer, turn_head, stop_ids) if turn_head is not None else None
        self._on_turn = on_turn
        self._on_ended = on_ended
        self._max_new_tokens = max_new_tokens
        self._plain = self._cut.idle
        self._swift: Callable[[str], None] | None = None  # on_text, where tokens may go straight on
        self._stop_ids = frozenset(stop_ids)
        self._opening = opening
        self._cancel: Callable[[KslError | None], None] | None = None
        self._held: list[Event] = []

    @property
    def done(self) -> bool:
        return self.ended_at is not None

    def attach(self, cancel: Callable[[KslError | None], None]) -> None:
        """Give it the way to cancel its sequence."""
        self._cancel = cancel

    def cancel(self, error: KslError | None = None) -> None:
        """End it from outside: silently (the client left), or with an error for the client."""
        if not self.done and self._cancel is not None:
            self._cancel(error)

    # ------------------------------------------------------------ sink

    def admitted(self, cached_tokens: int = 0) -> None:
        """It runs; cached_tokens positions of its prompt need not be computed."""
        self.usage.cached_tokens = cached_tokens
        self.admitted_at = time.monotonic()
        events: list[Event] = [Started()]
        if self._opening:
            events += self._parser.feed(self._opening)
        self._emit(events)

    def tokens(self, ids: Sequence[int], logprobs: Entries | None) -> None:
        """Ids sampled by one wave, the stop id included."""
        swift = self._swift
        if swift is not None and len(ids) == 1 and logprobs is None:
            # Nearly every token: a piece of visible text and no more.
            token, usage, detokenizer = ids[0], self.usage, self._detokenizer
            count = usage.completion_tokens + 1
            text = None if detokenizer.held else detokenizer.texts.get(token)
            if (
                text
                and token not in self._stop_ids
                and count < self._max_new_tokens
                and self._parser.take_text(text)
            ):
                usage.completion_tokens = count
                if self._turn is not None:
                    self._turn.ids.append(token)
                    self._turn.text.append(text)
                swift(text)
                return
        if self.ended_at is not None or not ids:
            return
        if len(ids) > 1 and not self._plain:
            self._one_by_one(ids, logprobs)
            return
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
            self._swift = self.on_text if self._plain else None
        usage = self.usage
        usage.completion_tokens += len(ids)
        if self._turn is not None:
            self._turn.ids += ids
        last = ids[-1] in self._stop_ids
        if logprobs is None and not self._parser.in_reasoning:
            text = self._detokenizer.feed(ids[:-1] if last else ids)
            if not last and usage.completion_tokens < self._max_new_tokens and self._say(text):
                return
            events = self._parser.feed(text) if text else []
        else:
            events = self._parse_singly(ids[:-1] if last else ids, logprobs)
            if last and self._parser.in_reasoning:
                usage.reasoning_tokens += 1
        if not self._plain:
            kept, cut = self._cut.feed(events)
            if cut is not None:
                if kept[-1:] != events[-1:]:
                    self._turn = None  # more was sampled than is shown
                self._stop_here(kept, cut)
                return
            events = kept
        if last or usage.completion_tokens >= self._max_new_tokens:
            # The scheduler ends this sequence in the same turn: one batch instead of two.
            self._held = events
        elif events:
            self._emit(events)

    def _one_by_one(self, ids: Sequence[int], logprobs: Entries | None) -> None:
        """What ends the generation may lie before the last of several ids: those behind it do not
        count. Still one batch of events."""
        batch: list[Event] = []
        client, self._client = self._client, batch.extend
        try:
            for at, token in enumerate(ids):
                self.tokens([token], logprobs[at : at + 1] if logprobs is not None else None)
        finally:
            self._client = client
        if batch:
            client(batch)

    def ended(self, reason: FinishReason, error: KslError | None) -> None:
        """The scheduler is done with the sequence; error is set when it failed."""
        if self.done:
            return
        events, self._held = self._held, []
        if error is not None:
            self._close(reason, error)
            self._emit([*events, Failed(error, self.usage)])
            return
        rest = self._detokenizer.flush()
        tail = (self._parser.feed(rest) if rest else []) + self._parser.finish(reason)
        tail, stop_string = self._cut.finish(tail)
        self._finish(events + tail, self._final_reason(reason, stop_string), stop_string)

    # ------------------------------------------------------------ helpers

    def _say(self, text: str) -> bool:
        """Pass on a piece without making an event of it, if that can be."""
        on_text = self.on_text
        if on_text is None or not (self._plain and text and self._parser.take_text(text)):
            return False
        if self._turn is not None:
            self._turn.text.append(text)
        on_text(text)
        return True

    def _parse_singly(self, ids: Sequence[int], logprobs: Entries | None) -> list[Event]:
        """Token by token: counts reasoning tokens exactly and puts log-probabilities beside their
        text. Only tokens after the reasoning have entries."""
        events: list[Event] = []
        for at, token in enumerate(ids):
            reasoning = self._parser.in_reasoning
            if reasoning:
                self.usage.reasoning_tokens += 1
            elif logprobs is not None:
                events.append(LogprobsDelta((self._entry(logprobs[at]),)))
            if text := self._detokenizer.feed((token,)):
                events += self._parser.feed(text)
        return events

    def _entry(self, values: list[tuple[int, float]]) -> TokenLogprob:
        """values: the sampled token first, then the most likely ones."""
        bytes_of = self._tokenizer.token_bytes
        (token, logprob), *top = values
        return TokenLogprob(
            bytes_of(token), token, logprob, tuple((bytes_of(t), t, value) for t, value in top)
        )

    def _stop_here(self, events: list[Event], stop_string: str) -> None:
        """End before the model does; the scheduler hears of it as a cancellation."""
        reason = FinishReason.STOP_STRING if stop_string else FinishReason.TOOL_CALLS
        cancel = self._cancel
        self._finish(events, reason, stop_string or None)
        if cancel is not None:
            cancel(None)

    def _final_reason(self, reason: FinishReason, stop_string: str | None) -> FinishReason:
        if stop_string is not None:
            return FinishReason.STOP_STRING if stop_string else FinishReason.TOOL_CALLS
        if reason is FinishReason.STOP and self._parser.saw_tool_call:
            return FinishReason.TOOL_CALLS
        return reason

    def _finish(self, events: list[Event], reason: FinishReason, stop_string: str | None) -> None:
        self._close(reason, None)
        events.append(Finished(reason, self.usage, stop_string or None))
        self._emit(events)
        log, self._turn = self._turn, None
        if log is not None and self._on_turn is not None:
            turn = log.turn(reason)
            if turn is not None:
                self._on_turn(turn)

    def _emit(self, events: list[Event]) -> None:
        if self._turn is not None:
            self._turn.took(events)
        self._client(events)

    def _close(self, reason: FinishReason, error: KslError | None) -> None:
        self.ended_at = time.monotonic()
        self._swift = None
        if self.written is not None:
            self.usage.cache_write_tokens = self.written()
        self.reason = reason
        self.error = error
        if self.statistics is not None:
            self.usage.statistics = self.statistics()
        if self._on_ended is not None:
            self._on_ended(self)
