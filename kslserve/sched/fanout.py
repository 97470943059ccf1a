"""Outbox: what sinks have to hear, collected while results are applied and told after the next
submit."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from kslserve import log
from kslserve.core.usage import FinishReason
from kslserve.errors import KslError
from kslserve.metrics import Labelled
from kslserve.sched.sequence import Sequence, State

_log = log.get("sched")
Logprobs = list[list[tuple[int, float]]]


class _Nobody:
    """Hears of sequences that have ended."""

    def admitted(self, cached_tokens: int) -> None: ...
    def tokens(self, ids: Items[int], logprobs: Logprobs | None) -> None: ...
    def ended(self, reason: FinishReason, error: KslError | None) -> None: ...


_NOBODY = _Nobody()


class Outbox:
    """ends: counts by reason. fail: called with a sequence whose sink raised while it still
    runs."""

    __slots__ = ("_ends", "_fail", "admitted", "ended", "spoken")

    def __init__(self, ends: Labelled, fail: Callable[[Sequence, KslError], None]) -> None:
        self.admitted: list[Sequence] = []
        self.spoken: list[tuple[Sequence, Items[int], Logprobs | None]] = []
        self.ended: list[Sequence] = []
        self._ends = ends
        self._fail = fail

    @property
    def empty(self) -> bool:
        return not (self.admitted or self.spoken or self.ended)

    def tell(self) -> None:
        """Call the sinks in order: admissions, tokens, ends. They may submit and cancel; what that
        ends is told the next time."""
        admitted, spoken, ended = self.admitted, self.spoken, self.ended
        if not (admitted or spoken or ended):
            return
        self.admitted, self.spoken, self.ended = [], [], []
        for sequence in admitted:
            if sequence.state is not State.ENDED and not sequence.told:
                sequence.told = True
                try:
                    sequence.sink.admitted(sequence.cached_tokens)
                except Exception as failure:
                    self._failed(sequence, failure)
        for sequence, tokens, logprobs in spoken:
            mark = sequence.mark
            # Tokens that came after a cancellation are dropped.
            if mark is None or mark[0] is not FinishReason.CANCELLED:
                try:
                    sequence.sink.tokens(tokens, logprobs)
                except Exception as failure:
                    self._failed(sequence, failure)
        for sequence in ended:
            assert sequence.mark is not None
            reason, error = sequence.mark
            self._ends["error" if error is not None else reason.value].inc()
            try:
                sequence.sink.ended(reason, error)
            except Exception as failure:
                _log.error("sink failed", sequence=sequence.number, error=repr(failure))
            # A sink knows how to cancel its sequence. Prompt and drafter, which take MiB, should
            # not wait until cycles are collected.
            sequence.sink = _NOBODY

    def _failed(self, sequence: Sequence, failure: Exception) -> None:
        """A fault of one consumer must not stop the others."""
        _log.error("sink failed", sequence=sequence.number, error=repr(failure))
        error = KslError("The generation could not be delivered.")
        if sequence.state is State.ENDED:
            sequence.mark = (FinishReason.CANCELLED, error)
        else:
            self._fail(sequence, error)
