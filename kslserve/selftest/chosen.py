"""Ids that a backend samples: those that the reference sampler draws from the same logits."""

from __future__ import annotations

import numpy as np

from kslserve.core.sampling import SamplingParams
from kslserve.engine.model import ModelSpec
from kslserve.engine.sampling import reference_sample
from kslserve.engine.types import Ids, OpKind, Row, RowKind, SlotConfig, StateOp
from kslserve.selftest.served import Sameness
from kslserve.selftest.waves import Waves

SAMPLED, MASKED = "sampled ids", "masked ids"
STEPS = 8  # of each kind
# All of them in one wave, a slot each.
SAMPLINGS = (
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=50),
    SamplingParams(temperature=1.5, min_p=0.05, top_p=0.6),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7),
    SamplingParams(
        temperature=1.0, frequency_penalty=0.5, logit_bias=((3, 5.0), (7, -100.0), (11, 2.0))
    ),
)


async def compare(waves: Waves, ids: Ids, spec: ModelSpec) -> list[Sameness]:
    """Takes as many slots as there are SAMPLINGS. Raises what running an engine raises."""
    slots = range(len(SAMPLINGS))
    rng = np.random.default_rng(int(ids[0]))
    outputs: list[list[int]] = [[] for _ in slots]

    def config(slot: int) -> SlotConfig:
        output = np.array(outputs[slot], np.int32)
        return SlotConfig(SAMPLINGS[slot], slot + 1, (), ids[slot : slot + 1], output)

    await waves.begin(slots)
    await waves.run(before=[StateOp(OpKind.CONFIGURE, slot, data=config(slot)) for slot in slots])
    wrong = {SAMPLED: 0, MASKED: 0}
    for step in range(2 * STEPS):
        masks = [None] * len(SAMPLINGS) if step < STEPS else [_mask(rng, spec) for _ in slots]
        before = [
            StateOp(OpKind.MASK, slot, data=mask)
            for slot, mask in enumerate(masks)
            if mask is not None
        ]
        rows = [
            Row(RowKind.LAST, slot, slot, step, 1, [-1] if step else ids[slot : slot + 1])
            for slot in slots
        ]
        done = await waves.run(before=before, rows=rows, taps=("logits",))
        logits = done.taps["logits"].reshape(len(SAMPLINGS), spec.vocab)
        for slot, mask in enumerate(masks):
            expected = reference_sample(
                logits[slot], spec.token_limit, config(slot), step + 1, mask
            )
            found = done.rows[slot].tokens
            wrong[SAMPLED if mask is None else MASKED] += found != (expected,)
            outputs[slot] += found
    return [Sameness(what, n / (STEPS * len(SAMPLINGS))) for what, n in wrong.items()]


def _mask(rng: np.random.Generator, spec: ModelSpec) -> np.ndarray:
    """One id in eight, and some id at least."""
    allowed = rng.random(-(-spec.vocab // 32) * 32) < 1 / 8
    allowed[rng.integers(spec.token_limit)] = True
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)
