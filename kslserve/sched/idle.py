"""Memory that goes back to the system while nothing runs.

An engine in the machine's own memory takes pages as slabs and blocks are first used and would keep
them. When nothing ran for a while, it is told to give up those that nobody holds, sequence or
checkpoint, so that a server in the background stays small. Whoever uses them next pays for new
pages; part of them is taken ahead of that (ahead.py).

Where there is a disk tier, checkpoints do not hold their pages for ever either: when nothing ran
for much longer, those worth a file get one, and then they leave memory. The next turn of such a
conversation reads its file, as after a restart."""

from __future__ import annotations

from collections.abc import Callable

from kslserve.engine.types import OpKind, StateOp
from kslserve.sched.ahead import Ahead
from kslserve.sched.blocks import ranges
from kslserve.sched.cache.manager import PrefixCache
from kslserve.sched.deadlines import CallLater, Timer
from kslserve.sched.memory import Memory

AGED = 20  # pauses of `after_s` after which checkpoints leave memory


class IdleMemory:
    """after_s: how long nothing must run; 0: never. send: submits ops alone; False if it could not.
    wake: asks for a turn, which carries what the cache copies."""

    __slots__ = (
        "_after_s", "_ahead", "_cache", "_call_later", "_done", "_memory", "_pauses", "_ready",
        "_send", "_timer", "_wake",
    )  # fmt: skip

    def __init__(
        self,
        memory: Memory,
        cache: PrefixCache,
        ahead: Ahead,
        after_s: float,
        call_later: CallLater,
        send: Callable[[list[StateOp]], bool],
        wake: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._cache = cache
        self._ahead = ahead
        self._after_s = after_s
        self._call_later = call_later
        self._send = send
        self._wake = wake
        self._timer: Timer | None = None
        self._pauses = 0  # since a sequence lived
        self._done = True  # nothing is left to give back until one does
        self._ready = True  # nothing is left to touch until one does

    def busy(self) -> None:
        """A sequence lives."""
        if self._pauses:
            self._pauses = 0
            self._cache.tiers.flushing = False
        self._done = self._ready = False
        self.stop()

    def quiet(self) -> None:
        """After a turn: nothing lives and nothing is in flight."""
        if not self._ready:
            self._ready = not self._touch()
            if not self._ready:
                return  # until this wave ends
        if self._timer is None and self._after_s and not self._done:
            self._timer = self._call_later(self._after_s, self._fire)

    def stop(self) -> None:
        """Nothing lives, and a wave is in flight; or nothing is to come any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        """Nothing ran all the while, or `busy` would have stopped the timer."""
        self._timer = None
        self._pauses += 1
        self._cache.tiers.host.images.give_back()
        ages = self._cache.can_age
        if ages and self._pauses >= AGED:
            if self._cache.age():
                self._wake()
                return
            ages = False
        self._done = self._drop() and not ages
        if not self._done:
            self._wake()  # and wait for the next pause

    def _touch(self) -> bool:
        """Touch the next piece of what a prompt will write; False if none is left, or the engine
        did not take it."""
        slabs, blocks = self._ahead.next()
        if not (slabs or blocks) or not self._send(self._ahead.ops(slabs, blocks)):
            return False
        self._ahead.touched(slabs, blocks)
        return True

    def _drop(self) -> bool:
        """Give up what nobody holds; False if the engine did not take that."""
        slabs, blocks = self._memory.slabs, self._memory.blocks
        idle = slabs.idle(), blocks.idle()
        ops = [StateOp(OpKind.DROP_SLABS, *part) for part in ranges(idle[0])]
        ops += [StateOp(OpKind.DROP_BLOCKS, *part) for part in ranges(idle[1])]
        if not ops:
            return True
        if not self._send(ops):
            return False
        slabs.touched -= idle[0]
        blocks.touched -= idle[1]
        return True
