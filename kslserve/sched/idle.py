"""Memory that goes back to the system while nothing runs.

An engine in the machine's own memory takes pages as slabs and blocks are first used and would keep
them. When nothing ran for a while, it is told to give up those that nobody holds, sequence or
checkpoint, so that a server in the background stays small. Whoever uses them next pays for new
pages, which is little beside computing what goes into them."""

from __future__ import annotations

from collections.abc import Callable

from kslserve.engine.types import OpKind, StateOp
from kslserve.sched.blocks import ranges
from kslserve.sched.deadlines import CallLater, Timer
from kslserve.sched.memory import Memory


class IdleMemory:
    """after_s: how long nothing must run; 0: never. send: submits ops alone; False if it could
    not."""

    __slots__ = ("_after_s", "_call_later", "_memory", "_send", "_timer")

    def __init__(
        self,
        memory: Memory,
        after_s: float,
        call_later: CallLater,
        send: Callable[[list[StateOp]], bool],
    ) -> None:
        self._memory = memory
        self._after_s = after_s
        self._call_later = call_later
        self._send = send
        self._timer: Timer | None = None

    def note(self, quiet: bool) -> None:
        """After every turn: whether nothing runs."""
        if not quiet:
            self.stop()
        elif self._timer is None and self._after_s and self._touched():
            self._timer = self._call_later(self._after_s, self._fire)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _touched(self) -> bool:
        return bool(self._memory.slabs.touched or self._memory.blocks.touched)

    def _fire(self) -> None:
        """Nothing ran all the while, or `note` would have stopped the timer."""
        self._timer = None
        slabs, blocks = self._memory.slabs, self._memory.blocks
        idle = slabs.idle(), blocks.idle()
        ops = [StateOp(OpKind.DROP_SLABS, *part) for part in ranges(idle[0])]
        ops += [StateOp(OpKind.DROP_BLOCKS, *part) for part in ranges(idle[1])]
        if ops and self._send(ops):
            slabs.touched -= idle[0]
            blocks.touched -= idle[1]
