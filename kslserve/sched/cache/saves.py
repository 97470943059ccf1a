"""Where a prompt gets checkpoints. Pure functions of positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kslserve.sched.cache.checkpoint import Kind

RANK = {kind: rank for rank, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True)
class CachePolicy:
    """min_tokens: shorter prefixes are not worth a checkpoint. gap: of two save points closer than
    this the less valuable one is dropped. interval: distance of save points inside long prompts.
    donor_wait_s: longest wait for a running prompt's checkpoint. host_bytes: size of the host tier,
    0: none. disk_min_tokens: shorter checkpoints are not written to disk. move_bytes: most that is
    copied between device and host beside the rows of one wave."""

    min_tokens: int = 16
    gap: int = 16
    interval: int = 4096
    donor_wait_s: float = 60.0
    host_bytes: int = 0
    disk_min_tokens: int = 256
    move_bytes: int = 16 << 20

    @property
    def part_bytes(self) -> int:
        """Most of a slab in one op."""
        return self.move_bytes // 2


@dataclass(frozen=True, order=True, slots=True)
class SavePoint:
    position: int
    kind: Kind = Kind.INTERVAL


def save_points(
    prompt: int,
    start: int,
    junction: int,
    boundaries: Sequence[int],
    taken: Iterable[int],
    policy: CachePolicy,
) -> list[SavePoint]:
    """Ascending save points inside (start, prompt).

    prompt: its length. start: positions that are adopted. junction: how far it follows a known
    path. taken: positions on the way that have a checkpoint. A point at the prompt's end would
    serve nobody but longer prompts, which adopt the end of the generation instead.
    """
    wanted = [(junction, Kind.JUNCTION)]
    wanted += [(b, Kind.SYSTEM) for b in boundaries[:-1]]
    wanted += [(b, Kind.STABLE) for b in boundaries[-1:]]
    wanted += [(prompt - 1, Kind.PROMPT)]
    first = start - start % policy.interval + policy.interval
    wanted += [(p, Kind.INTERVAL) for p in range(first, prompt, policy.interval)]
    near = [start, *taken]
    chosen: list[SavePoint] = []
    for position, kind in sorted(wanted, key=lambda w: RANK[w[1]]):
        if not max(start, policy.min_tokens - 1) < position < prompt:
            continue
        if any(abs(position - other) < policy.gap for other in near):
            continue
        near.append(position)
        chosen.append(SavePoint(position, kind))
    return sorted(chosen, key=lambda p: p.position)
