"""How many drafts a wave verifies, and how many MTP makes for the next one. Pure functions.

Verifying one more draft costs time for all rows of a wave and gains its probability of coming true
for one. The best number is where the tokens per time are most; it is none unless that is better
than plain decode by a `gain`. Chances count for a part of what they promise, since drafts are
chosen for being promising: estimates that err upwards are taken more often than others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TRUST_CHAIN = 0.9  # of an estimated chance of drafts that MTP is to make
# Least gain over plain decode for which anything is drafted, where nothing was drafted before; and
# where something was, or the choice would change with every breath.
GAIN, STAY = 1.1, 1.05
CLEAR = 1.4  # a gain of which it is no matter what exactly waves cost
# There, all drafts that are as good as sure are verified, since they share what a wave costs beside
# its columns, though by a part the times that were measured may speak for fewer: waves that are not
# chosen are not measured again.
SURE, ALIKE = 0.9, 0.15


def choose_lanes(
    survival: Sequence[Sequence[float]],
    ms: Callable[[int], float],
    rows: int,
    most: int,
    gain: float,
    trust: float,
) -> tuple[list[int], float]:
    """How many of its drafts each row verifies, and what that gains: tokens per time, of what plain
    decode gives.

    survival: by row, the probabilities that its drafts come true up to each, descending. ms: time
    of a wave by its columns, of which plain rows are `rows`. most: drafts of the wave. trust: part
    of the chances that counts.
    """
    counts = [0] * len(survival)
    ranked = [(p, i) for i, chances in enumerate(survival) for p in chances]
    if len(survival) > 1:
        ranked.sort(key=lambda lane: -lane[0])
    plain = rows / ms(rows)
    best, best_n = gain * plain, 0
    expected = float(rows)
    for n, (chance, _) in enumerate(ranked[:most], start=1):
        expected += trust * chance
        rate = expected / ms(rows + n)
        if rate > best:
            best, best_n = rate, n
        elif best > CLEAR * plain and chance >= SURE and rate > (1.0 - ALIKE) * best:
            best_n = n
    for _, i in ranked[:best_n]:
        counts[i] += 1
    return counts, best / plain if best_n else 1.0


def choose_depths(
    survival: Sequence[Sequence[float]],
    ms: Callable[[int], float],
    step_ms: Callable[[int], float],
    rows: int,
    most: int,
) -> list[int]:
    """How deep each row's MTP chain is to be. The same as above, for drafts that are still to be
    made: a step costs time too, once for all rows that take it. step_ms: by their number."""
    counts = [0] * len(survival)
    ranked = sorted(
        ((p, depth, i) for i, chances in enumerate(survival) for depth, p in enumerate(chances)),
        key=lambda lane: (-lane[0], lane[1]),
    )
    taking: list[int] = []  # rows that take each step
    best, best_n = GAIN * rows / ms(rows), 0
    expected, drafting = float(rows), 0.0
    for n, (chance, depth, _) in enumerate(ranked[:most], start=1):
        expected += TRUST_CHAIN * chance
        if depth == len(taking):
            taking.append(0)
        drafting -= step_ms(taking[depth]) if taking[depth] else 0.0
        taking[depth] += 1
        drafting += step_ms(taking[depth])
        rate = expected / (ms(rows + n) + drafting)
        if rate > best:
            best, best_n = rate, n
    for _, _, i in ranked[:best_n]:
        counts[i] += 1
    return counts
