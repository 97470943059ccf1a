"""Constraint: which ids one generation may sample next.

A generation goes through stages: reasoning, the answer as JSON or as text, and inside of a strict
tool's call its name, keys, values and closing tags. Masks are made only where structure is open;
inside reasoning, text and free string values at most the end of the turn is forbidden, which is
the same mask every time.

A held stage works in a worker thread, since a mask takes up to some hundred microseconds and a
grammar a millisecond; the others only look at ids, at once and on the loop. The two never overlap:
between `advance` and `ready` nobody else touches the stage.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np

from kslserve import log
from kslserve.errors import KslError
from kslserve.service.grammar import SamplingFault
from kslserve.service.stage import Kit, Mask, Rules, Stage
from kslserve.service.stages import first_stage

_log = log.get("constrain")


def call_on(
    loop: asyncio.AbstractEventLoop, call: Callable[[KslError], None], error: KslError
) -> None:
    """Have `call(error)` happen on a loop that may have ended."""
    try:
        loop.call_soon_threadsafe(call, error)
    except RuntimeError:
        _log.debug("nobody waits any more")


class Constraint:
    """One generation's guide (`sched.sequence.Guide`). later: puts a constraint into the queue of
    the workers. Made on any thread; `work` is the workers', all else the loop's."""

    __slots__ = (
        "_callback",
        "_done",
        "_fail",
        "_failure",
        "_forced",
        "_ids",
        "_later",
        "_stage",
        "kit",
        "mask",
        "ready",
        "rules",
        "version",
    )

    def __init__(self, kit: Kit, rules: Rules, later: Callable[[Constraint], None]) -> None:
        self.kit = kit
        self.rules = rules
        self.mask: Mask | None = None
        self.version = 0
        self.ready = False
        self._later = later
        self._forced: list[int] = []
        self._ids: Sequence[int] = ()
        self._done = threading.Event()
        self._callback: Callable[[], None] | None = None
        self._fail: Callable[[KslError], None] | None = None
        self._failure: KslError | None = None
        self._stage: Stage = first_stage(self)
        self.work()

    # ------------------------------------------------------------ for the scheduler

    def advance(self, ids: Sequence[int]) -> list[int]:
        """Ids that a wave sampled. Returns those that must come next, as if sampled too; they are
        not to be given to `advance`. `ready` is False until the mask is that of the position after
        all of them."""
        forced: list[int] = []
        if not self._stage.held:
            try:
                forced, ids = self._take(ids), ()
                if not self._stage.held:
                    self._settle()
                    return forced
            except Exception as error:
                self.ready = False
                self._give_up(error)
                return []
        self._ids = ids
        self.ready = False
        self._done.clear()
        self._later(self)
        return forced

    def wait(self, timeout_s: float) -> bool:
        """Block for at most the time; True if it is ready."""
        return self.ready or (self._done.wait(timeout_s) and self.ready)

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once from a worker when it is ready; at once if it is."""
        self._callback = callback
        if self.ready:
            self._call_back()

    @property
    def failed(self) -> bool:
        """The grammar cannot be followed."""
        return self._failure is not None

    def when_failed(self, fail: Callable[[KslError], None]) -> None:
        """Have `fail` called, perhaps from a worker, if the grammar cannot be followed."""
        self._fail = fail
        if self._failure is not None:
            fail(self._failure)

    # ------------------------------------------------------------ for the workers

    def work(self) -> None:
        """Follow the ids of the last `advance` and make the mask."""
        try:
            ids, self._ids = self._ids, ()
            self._take(ids)
            self._settle()
        except BaseException as error:  # the library's panics are no Exceptions
            self._give_up(error)
        self._done.set()
        if self._failure is None:
            self._call_back()

    def _take(self, ids: Sequence[int]) -> list[int]:
        """Follow ids, and those that they make the stages force, which are returned."""
        for token in ids:
            self._stage = self._stage.take(token)
        forced, self._forced = self._forced, []
        for token in forced:
            self._stage = self._stage.take(token)
        return forced

    def _settle(self) -> None:
        while self._stage.held and (stage := self._stage.open()) is not self._stage:
            self._stage = stage
        stage = self._stage
        if stage.matcher is not None:
            mask = np.zeros(self.kit.grammars.words, np.uint32)
            stage.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if stage.matcher.is_error():
                raise ValueError(stage.matcher.get_error()[:300])
            for token in stage.extra():
                mask[token >> 5] |= np.uint32(1 << (token & 31))
        else:
            found = stage.constant
            if found is self.mask:
                self.ready = True
                return
            mask = found  # type: ignore[assignment]
        self.mask = mask
        self.version += 1
        self.ready = True

    def _give_up(self, error: BaseException) -> None:
        """A fault of ours or of the library ends this generation, and no other."""
        _log.warning("constraint failed", error=repr(error))
        self._failure = SamplingFault("The output could not be held to its grammar.")
        if self._fail is not None:
            self._fail(self._failure)

    def _call_back(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            try:
                callback()
            except RuntimeError:
                _log.debug("nobody waits any more")  # its loop was closed

    def force(self, ids: list[int]) -> None:
        """For stages: these ids come next, whatever the model says."""
        self._forced = ids
