"""What a checkpoint is worth: tokens that it saves, times the chance that somebody needs it.

Without it a request would start at the checkpoint before it, so only the tokens between the two are
saved. The chance follows from its place in the tree. The deepest checkpoint of a conversation is
what the next turn adopts. One below which everything went on along one path was superseded: only a
repeated or edited request needs it. One below which paths part is a shared beginning. Every chance
fades with the number of admissions since it was made or used, not with time: a night without
requests makes nothing worthless.
"""

from __future__ import annotations

from collections.abc import Callable

from kslserve.sched.cache.checkpoint import Checkpoint, Kind
from kslserve.sched.cache.index import Node

LEAF = 0.6
SHARED = 0.3
SUPERSEDED = {
    Kind.JUNCTION: 0.15,
    Kind.STABLE: 0.04,
    Kind.SYSTEM: 0.3,
    Kind.PROMPT: 0.04,
    Kind.INTERVAL: 0.02,
    Kind.GENERATION: 0.02,
}
HITS_MAX = 8  # hits beyond these say nothing new
HALF_LIFE = 48.0  # admissions after which a chance is half

Score = Callable[[Checkpoint, int], float]


def saved(node: Node) -> int:
    """Tokens between this place and the nearest checkpoint before it."""
    above = node.parent
    while above is not None and above.checkpoint is None:
        above = above.parent
    return node.end - (above.end if above is not None else 0)


def chance(kind: Kind, node: Node, hits: int, age: int) -> float:
    """A relative likelihood that a checkpoint here is adopted soon. age: admissions since it was
    used."""
    branches = sum(1 for child in node.children.values() if child.total)
    if not branches:
        likely = LEAF if kind is not Kind.INTERVAL else SHARED
    elif branches > 1:
        likely = SHARED * (1 + min(hits, HITS_MAX))
    else:
        likely = SUPERSEDED[kind]
    return likely * 0.5 ** (age / HALF_LIFE)


def durability(checkpoint: Checkpoint) -> float:
    """A relative likelihood that it is adopted much later, perhaps after a restart; 0 for one that
    is not worth a copy below the device. The next turn of a conversation goes on from the end of
    the last answer, whose exact ids are kept as long; the boundary before that answer is for
    clients that change it."""
    node = checkpoint.node
    branches = sum(1 for child in node.children.values() if child.total)
    if not branches:
        return 1.0 if checkpoint.kind is not Kind.INTERVAL else 0.0
    if checkpoint.kind is Kind.SYSTEM or branches > 1:
        return 0.5
    return 0.4 if checkpoint.kind in (Kind.STABLE, Kind.PROMPT) and node.below <= 1 else 0.0


def lasting(checkpoint: Checkpoint) -> bool:
    """Whether it is worth a copy below the device."""
    return durability(checkpoint) > 0.0


def durable_value(checkpoint: Checkpoint, now: int) -> float:
    """Like `value`, for copies that stand alone."""
    fading = 0.5 ** ((now - checkpoint.used) / HALF_LIFE)
    return checkpoint.position * durability(checkpoint) * fading


def value(checkpoint: Checkpoint, now: int) -> float:
    """Expected tokens saved. Of two that free the same memory the lower one goes first."""
    node = checkpoint.node
    return saved(node) * chance(checkpoint.kind, node, checkpoint.hits, now - checkpoint.used)


def recency(checkpoint: Checkpoint, now: int) -> float:
    """The other policy, to compare with: least recently used first."""
    return float(checkpoint.used)
