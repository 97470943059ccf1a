"""Deadlines: what is too old, and one timer for the next moment at which something will be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kslserve.errors import KslError, RequestExpired, Unavailable
from kslserve.sched.sequence import Sequence, State

NEVER = float("inf")
SLACK_S = 0.001  # timers may fire a little early


class Timer(Protocol):
    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Timer]


class Deadlines:
    """queue_s: longest wait for a place; request_s: longest life; 0: none. due: when `callback`
    must run next, in seconds of the scheduler's clock."""

    __slots__ = ("_call_later", "_callback", "_timer", "due", "queue_s", "request_s")

    def __init__(
        self, queue_s: float, request_s: float, callback: Callable[[], None], call_later: CallLater
    ) -> None:
        self.queue_s = queue_s
        self.request_s = request_s
        self.due = NEVER
        self._callback = callback
        self._call_later = call_later
        self._timer: Timer | None = None

    def of(self, sequence: Sequence) -> float:
        """The moment at which this sequence is too old."""
        due = sequence.arrived + self.request_s if self.request_s else NEVER
        if self.queue_s and sequence.state is State.QUEUED:
            due = min(due, sequence.queued + self.queue_s)
        return due

    def watch(self, sequences: Iterable[Sequence], now: float) -> None:
        """Make sure that the callback runs when the first of them is too old."""
        due = min((self.of(s) for s in sequences), default=NEVER)
        if due < self.due:
            self.stop()
            self.due = due
            self._timer = self._call_later(max(0.0, due - now) + SLACK_S, self._fire)

    def error(self, sequence: Sequence, now: float) -> KslError | None:
        """Why it must end now, or None."""
        if now < self.of(sequence):
            return None
        if self.request_s and now >= sequence.arrived + self.request_s:
            return RequestExpired(f"The request took longer than {self.request_s:g} s.")
        return Unavailable(f"The request waited {self.queue_s:g} s for a place.", retry_after_s=2)

    def stop(self) -> None:
        """Forget the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.due = NEVER

    def _fire(self) -> None:
        self._timer = None
        self._callback()
