"""A model that is none: tokens as a hash of the tokens before them.

A sequence's state is the list of its tokens and, beside it, a chain of hashes, one per position,
each over all tokens up to it."""

from __future__ import annotations

from typing import Any, Protocol

from kslserve.engine.contract import UNSET
from kslserve.engine.types import SlotConfig

CHAIN_MASK = (1 << 60) - 1  # of chain values: ints of two digits, which are the fastest


class Timeline:
    """A slab: tokens [0, n) of one sequence and the hash chain over them."""

    __slots__ = ("chain", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.chain: list[int] = []

    def copy_from(self, other: Timeline) -> None:
        self.tokens = list(other.tokens)
        self.chain = list(other.chain)

    def cut(self, n: int) -> Timeline:
        part = Timeline()
        part.tokens = self.tokens[:n]
        part.chain = self.chain[:n]
        return part

    def append(self, token: int) -> int:
        """Extend by one token; the new chain value."""
        # Of numbers, Python's hash is the same in every process.
        value = hash((self.chain[-1] if self.chain else 0, token)) & CHAIN_MASK
        self.tokens.append(token)
        self.chain.append(value)
        return value


class Slot:
    """A slot: its block table and what sampling needs. salt: of the seed, 0 at temperature 0.
    script is free for the model's use."""

    __slots__ = (
        "config", "drafts", "forced", "last", "latched", "mask", "salt", "sampled", "script",
        "stop_ids", "table",
    )  # fmt: skip

    def __init__(self, blocks: int) -> None:
        self.table = [UNSET] * blocks
        self.config: SlotConfig | None = None
        self.configure(None)

    def configure(self, config: SlotConfig | None) -> None:
        self.config = config
        warm = config is not None and config.sampling.temperature > 0.0
        self.salt = hash((config.seed, 1)) & CHAIN_MASK if config is not None and warm else 0
        self.stop_ids = frozenset(config.stop_ids) if config else frozenset()
        self.latched = False
        self.mask: Any = None
        self.forced: list[int] = []
        self.drafts: list[int] = []
        self.last = -1
        self.sampled = 0
        self.script: Any = None


class TokenModel(Protocol):
    """Chooses tokens. Both methods are pure except for `slot.script`."""

    def token(self, slot: Slot, timeline: Timeline) -> int:
        """The id sampled after the timeline; -1 for bad logits."""

    def top(self, timeline: Timeline, token: int, n: int) -> list[tuple[int, float]]:
        """[(token, its log-probability), n most probable...]; (-1, 0.0) first for token -1."""


class HashModel:
    """Ids below `limit` as a hash of (seed, all tokens so far), thus of nothing that batching could
    change. Temperature 0 ignores the seed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def token(self, slot: Slot, timeline: Timeline) -> int:
        first = (timeline.chain[-1] ^ slot.salt) % self.limit
        if slot.mask is None:
            return first
        for step in range(self.limit):
            candidate = (first + step) % self.limit
            if int(slot.mask[candidate >> 5]) >> (candidate & 31) & 1:
                return candidate
        return -1

    def top(self, timeline: Timeline, token: int, n: int) -> list[tuple[int, float]]:
        value = timeline.chain[-1]
        best = [((value >> 8) + 7 * k) % self.limit for k in range(n)]
        entries = [(i, -0.25 - k) for k, i in enumerate(best)]
        if token < 0:
            return [(-1, 0.0), *entries]
        own = next((p for i, p in entries if i == token), -1.0 - float(value % 16))
        return [(token, own), *entries]
