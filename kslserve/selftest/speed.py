"""How fast a backend runs a model without data."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from kslserve.engine.types import Row, RowKind
from kslserve.selftest.waves import Waves, given

WARM_UP = 4
STEPS = 24


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of all streams together."""

    what: str
    tokens_per_s: float


async def decode(waves: Waves, streams: int, context: int) -> Speed:
    """Plain decode at `context` positions, whose K and V are whatever the pool holds: that costs
    the same to read."""
    await waves.begin(range(streams))
    times = []
    for step in range(WARM_UP + STEPS):
        first = step == 0
        rows = [
            Row(RowKind.LAST, slot, slot, context + step, 1, [7 + slot if first else -1])
            for slot in range(streams)
        ]
        done = await waves.run(rows=rows)
        if step >= WARM_UP:
            times.append(done.ended_ns - done.started_ns)
    name = f"decode, {streams} stream{'s' * (streams != 1)} at {context} tokens"
    return Speed(name, streams * 1e9 / statistics.median(times))


async def prompt(waves: Waves, tokens: int) -> Speed:
    """A cold prompt in the widest waves; the second of two runs counts."""
    columns = waves.engine.info.wave_columns
    ids = (np.arange(tokens, dtype=np.int32) % 199) + 1
    spent = 0
    for _ in range(2):
        await waves.begin([0])
        spent = 0
        for start in range(0, tokens, columns):
            done = await waves.run(rows=[given(0, start, ids[start : start + columns])])
            spent += done.ended_ns - done.started_ns
    return Speed(f"prompt of {tokens} tokens", tokens * 1e9 / spent)
