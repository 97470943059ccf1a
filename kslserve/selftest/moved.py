"""State that a backend copies: inside its pools, out of a row as it passes, and from and to images
in host memory, whole and in parts, while rows run beside. All of it in bits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kslserve.engine.types import Ids, OpKind, Row, RowKind, StateOp
from kslserve.selftest.served import Sameness
from kslserve.selftest.waves import Waves, given

CUTS, COPIES = "cuts", "copies"
LENGTH = 60  # of rows that give the same bits however they are cut up
PLACES = (1, 30, LENGTH)  # of cuts
PART = 1000  # bytes; a multiple of nothing

Image = npt.NDArray[np.uint8]


async def compare(waves: Waves, ids: Ids) -> list[Sameness]:
    """Takes slots 0 to 2 and all slabs; six of them at least. Raises what running an engine
    raises."""
    info = waves.engine.info
    await waves.begin([0, 1, 2])
    cuts = tuple((place, 3 + i) for i, place in enumerate(PLACES))
    await waves.run(rows=[Row(RowKind.PREFILL, 0, 0, 0, LENGTH, ids[:LENGTH], cuts=cuts)])
    found, expected = [], []
    for place, into in cuts:
        await waves.begin([1])
        await waves.run(rows=[given(1, 0, ids[:place])])
        found.append(await _slab(waves, into))
        expected.append(await _slab(waves, 1))
    differing = [Sameness(CUTS, _differing(found, expected))]

    block = np.zeros(info.block_bytes, np.uint8)
    other = 2 * info.blocks_per_slot  # the first block of slot 2, which runs beside from the second
    await waves.run(before=[StateOp(OpKind.SAVE_BLOCK, 0, data=block)])
    slab = expected[-1]
    # In one wave with a row: a copy in the pools, a load in parts, a save that sees both.
    saved = np.zeros_like(slab), np.zeros_like(slab), np.zeros_like(block), np.ones_like(slab)
    spare = other + info.blocks_per_slot - 1
    await waves.run(
        before=[
            StateOp(OpKind.COPY_SLAB, 1, 3),
            *_parts(OpKind.LOAD_SLAB, 4, slab),
            StateOp(OpKind.COPY_BLOCK, 0, spare - 1),
            StateOp(OpKind.LOAD_BLOCK, spare, data=block.copy()),
            StateOp(OpKind.ZERO_SLAB, 0),
        ],
        rows=[given(2, 0, ids[:LENGTH])],
        after=[
            *_parts(OpKind.SAVE_SLAB, 3, saved[0]),
            StateOp(OpKind.SAVE_SLAB, 4, data=saved[1]),
            StateOp(OpKind.SAVE_BLOCK, spare, data=saved[2]),
            StateOp(OpKind.SAVE_SLAB, 0, data=saved[3]),
        ],
    )
    copied = np.zeros_like(block)
    await waves.run(before=[StateOp(OpKind.SAVE_BLOCK, spare - 1, data=copied)])
    beside = await _slab(waves, 2)
    found = [*saved, copied, beside]
    expected = [slab, slab, block, np.zeros_like(slab), block, slab]
    return [*differing, Sameness(COPIES, _differing(found, expected))]


async def _slab(waves: Waves, index: int) -> Image:
    image = np.zeros(waves.engine.info.slab_bytes, np.uint8)
    await waves.run(before=[StateOp(OpKind.SAVE_SLAB, index, data=image)])
    return image


def _parts(kind: OpKind, slab: int, image: Image) -> list[StateOp]:
    """A slab in three parts of uneven size."""
    ends = (0, PART, len(image) // 2 + 1, len(image))
    return [StateOp(kind, slab, begin, image[begin:end]) for begin, end in pairwise(ends)]


def _differing(found: list[Image], expected: list[Image]) -> float:
    return float(np.mean(np.concatenate(found) != np.concatenate(expected)))
