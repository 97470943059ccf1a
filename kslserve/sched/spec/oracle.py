"""Oracle: MTP drafts that come true as often as a bench wants. A hook for models whose own drafts
mean nothing: the head is run, and what it drafted is replaced."""

from __future__ import annotations

from kslserve.engine.types import Ids
from kslserve.sched.sequence import Sequence
from kslserve.sched.spec.acceptance import Averages
from kslserve.sched.spec.drafter import Drafter
from kslserve.sched.spec.patience import Patience

_SPREAD = 0x9E3779B1


class Oracle(Drafter):
    """forced: what the sequence will sample. rate: probability that a draft is right."""

    __slots__ = ("_forced", "_rate")

    def __init__(
        self, chain: Averages | None, patience: Patience, lanes: int, forced: Ids, rate: float
    ) -> None:
        super().__init__(None, chain, patience, lanes)
        self._forced = forced
        self._rate = rate

    def read(self, sequence: Sequence) -> None:
        """Replace the drafts for the next positions."""
        at = len(sequence.output)
        known = self._forced[at : at + len(self.held)].tolist()
        self.held = [token ^ self._is_wrong(at + i) for i, token in enumerate(known)]

    def _is_wrong(self, place: int) -> int:
        """1 or 0, the same at every look."""
        word = (place + 1) * _SPREAD & 0xFFFFFFFF
        word = (word ^ word >> 15) * _SPREAD & 0xFFFFFFFF
        return int((word ^ word >> 16) / 2**32 >= self._rate)
