"""How often drafts come true: moving averages that say how far a draft will get.

Of the suffix index every new token tells, for each length of match, whether its prediction came
true, drafted or not: that costs nothing and is always up to date. Of MTP drafts only drafting
tells. A sequence starts with what all sequences before it saw."""

from __future__ import annotations

from collections.abc import Sequence as Items

OWN_RATE = 1 / 16  # weight of one outcome in the average of a sequence
ALL_RATE = 1 / 64  # and in that of all of them
MATCHES = (3, 4, 6, 8, 12, 20, 32)  # least lengths of the classes of matches
# Cautious for short matches; of long ones most come true in any text.
MATCH_PRIOR = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LEAST = 0.05  # a draft that comes true more rarely is never worth a column
DEPTH_CLASSES = 8  # deeper MTP drafts count as the last class
DEPTH_PRIOR = (0.6,) * DEPTH_CLASSES
_CLASS_OF = [max(i for i, least in enumerate(MATCHES) if n >= least) for n in range(3, 33)]


class Averages:
    """One average per class of outcomes. `parent`: the averages of all sequences, which these start
    from and teach."""

    __slots__ = ("parent", "values")

    def __init__(self, values: Items[float], parent: Averages | None = None) -> None:
        self.values = list(values)
        self.parent = parent

    def child(self) -> Averages:
        return Averages(self.values, self)

    def note(self, which: int, hit: bool) -> None:
        """One outcome."""
        self.values[which] += OWN_RATE * (hit - self.values[which])
        if self.parent is not None:
            values = self.parent.values
            values[which] += ALL_RATE * (hit - values[which])


def match_class(length: int) -> int:
    """Class of a match, whose length is at least the first of MATCHES."""
    return _CLASS_OF[min(length, MATCHES[-1]) - MATCHES[0]]


def suffix_survival(
    averages: Averages, length: int, n: int, least: float = LEAST, start: float = 1.0
) -> list[float]:
    """Probability that each of n copied tokens, and all before it, come true, up to the first that
    is below `least`. length: of the match that they follow; start: probability of what precedes
    them."""
    values, survival, result = averages.values, start, []
    for i in range(length, length + n):
        survival *= values[_CLASS_OF[i - 3]] if i < 32 else values[-1]
        if survival < least:
            break
        result.append(survival)
    return result


def chain_survival(averages: Averages, n: int, least: float = LEAST) -> list[float]:
    """The same for the first n drafts of an MTP chain."""
    values, survival, result = averages.values, 1.0, []
    for i in range(n):
        survival *= values[i if i < DEPTH_CLASSES else -1]
        if survival < least:
            break
        result.append(survival)
    return result
