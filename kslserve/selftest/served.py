"""A backend as it serves: without taps, in waves that come again, which a device replays as graphs,
and with drafts of its own. Each is compared with what the same backend gives otherwise, bit by bit:
watched, it has been compared with the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kslserve.engine.types import Draft, Ids, OpKind, Row, RowKind, StateOp
from kslserve.selftest.waves import Waves, given

UNWATCHED, DRAFTED = "unwatched", "own drafts"
LONG, SHORT = 150, 40  # columns of the prompts: of a large wave, of a small one
AGAIN = 5  # waves of one shape: the second is captured, the others replay it
DRAFTS = 5


@dataclass(frozen=True, slots=True)
class Sameness:
    """what: was compared. differing: the share of bytes, or of ids, that are not equal."""

    what: str
    differing: float


async def compare(waves: Waves, ids: Ids) -> list[Sameness]:
    """Takes slots 0 and 1. Raises what running an engine raises."""
    states = [await _state(waves, slot, ids, watched) for slot, watched in ((0, True), (1, False))]
    found = [Sameness(UNWATCHED, float(np.mean(states[0] != states[1])))]
    if waves.engine.info.has_mtp:
        drafted = await _drafted(waves, 0, ids[:SHORT])
        plain = await _plain(waves, 1, ids[:SHORT], len(drafted))
        found.append(Sameness(DRAFTED, float(np.mean(np.array(drafted) != np.array(plain)))))
    return found


async def _state(waves: Waves, slot: int, ids: Ids, watched: bool) -> npt.NDArray[np.uint8]:
    """The slab and the first block after a prompt, decode rows and rows with given drafts."""
    taps = ("logits",) if watched else ()
    await waves.begin([slot])
    await waves.run(rows=[given(slot, 0, ids[:LONG])], taps=taps)
    at = LONG
    for _ in range(AGAIN):
        await waves.run(rows=[given(slot, at, ids[at : at + 1])], taps=taps)
        at += 1
    for _ in range(AGAIN):
        drafts = ids[at : at + 1 + DRAFTS]
        row = Row(RowKind.VERIFY, slot, slot, at, len(drafts), drafts, draft=Draft.GIVEN)
        done = await waves.run(rows=[row], taps=taps)
        at = done.rows[0].position
    info = waves.engine.info
    slab, block = (np.zeros(size, np.uint8) for size in (info.slab_bytes, info.block_bytes))
    first = slot * info.blocks_per_slot
    save = [
        StateOp(OpKind.SAVE_SLAB, slot, data=slab),
        StateOp(OpKind.SAVE_BLOCK, first, data=block),
    ]
    await waves.run(before=save)
    return np.concatenate([slab, block])


async def _drafted(waves: Waves, slot: int, prompt: Ids) -> list[int]:
    """Ids of rows that verify what the head drafted."""
    await waves.begin([slot])
    row = Row(RowKind.LAST, slot, slot, 0, len(prompt), prompt, propose=DRAFTS)
    done = (await waves.run(rows=[row])).rows[0]
    out = list(done.tokens)
    for _ in range(AGAIN):
        at, n = done.position, 1 + DRAFTS
        row = Row(RowKind.VERIFY, slot, slot, at, n, [-1], draft=Draft.OWN, propose=DRAFTS)
        done = (await waves.run(rows=[row])).rows[0]
        out += done.tokens
    return out


async def _plain(waves: Waves, slot: int, prompt: Ids, n: int) -> list[int]:
    await waves.begin([slot])
    tokens: Sequence[int] | Ids = prompt
    at = 0
    out: list[int] = []
    for _ in range(n):
        row = Row(RowKind.LAST, slot, slot, at, len(tokens), tokens)
        done = (await waves.run(rows=[row])).rows[0]
        out += done.tokens
        at, tokens = done.position, [-1]
    return out
