"""An engine that is asked for waves, and waited for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kslserve.core.sampling import SamplingParams
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Done, OpKind, Row, RowKind, SlotConfig, StateOp, TableEdit, Wave
from kslserve.errors import EngineError

Ids = npt.NDArray[np.int32]
GREEDY = SamplingParams(temperature=0.0)


class Waves:
    """Runs waves of an open engine, which it closes in the end. For one running event loop.

    Slot s has slab s and the blocks from s * blocks_per_slot on."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self._id = 0
        self._waiting: deque[asyncio.Future[Done]] = deque()
        engine.start(self._done)

    def __enter__(self) -> Waves:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.engine.close()

    def _done(self, done: Done) -> None:
        self._waiting.popleft().set_result(done)

    def send(self, **parts: Any) -> asyncio.Future[Done]:
        """Submit a wave, whose parts are the fields of Wave; what it will have done. EngineError
        where the engine does not take it."""
        self._id += 1
        if not self.engine.submit(Wave(self._id, **parts)):
            raise EngineError("The engine did not take a wave although there is room.")
        self._waiting.append(asyncio.get_running_loop().create_future())
        return self._waiting[-1]

    async def run(self, **parts: Any) -> Done:
        """One wave from beginning to end. EngineError where it fails."""
        done = await self.send(**parts)
        if done.error:
            raise EngineError(done.error)
        return done

    async def begin(self, slots: Sequence[int]) -> None:
        """New greedy sequences in these slots."""
        per_slot = self.engine.info.blocks_per_slot
        before, edits = [], []
        for slot in slots:
            before.append(StateOp(OpKind.ZERO_SLAB, slot))
            before.append(StateOp(OpKind.CONFIGURE, slot, data=SlotConfig(GREEDY, slot)))
            edits.append(TableEdit(slot, 0, range(slot * per_slot, (slot + 1) * per_slot)))
        await self.run(before=before, edits=edits)


def given(slot: int, start: int, ids: Ids, kind: RowKind = RowKind.PREFILL) -> Row:
    """A row of known ids."""
    return Row(kind, slot, slot, start, len(ids), ids)
