"""How often drafts come true: moving averages that say how far a draft will get.

Of the suffix index every new token tells, for each length of match, whether its prediction came
true, drafted or not: that costs nothing and is always up to date. Of MTP drafts only drafting
tells. A sequence starts with what all sequences before it saw. Drafts that are verified are those
that promised most, so estimates that err upwards are among them: what they keep of it is known."""

from __future__ import annotations

from collections.abc import Sequence as Items

OWN_RATE = 1 / 16  # least weight of one outcome in the average of a sequence
ALL_RATE = 1 / 64  # and in that of all of them
OWN_MOST = 5  # outcomes in one sequence that outweigh what all others saw
MATCHES = (3, 4, 6, 8, 12, 20, 32)  # least lengths of the classes of matches
# Cautious for short matches; of long ones most come true in any text, so it takes many outcomes to
# outweigh that.
MATCH_PRIOR = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
MATCH_WEIGHT = 15
LEAST = 0.05  # a draft that comes true more rarely is never worth a column
DEPTH_CLASSES = 8  # deeper MTP drafts count as the last class
# Of MTP drafts nothing is known before some were made: nearly all come true in a template, hardly
# any in noise. A depth that few chains reached is taken for a little worse than the one before.
DEPTH_PRIOR = (0.6,) * DEPTH_CLASSES
DEPTH_WEIGHT = 2
DEPTH_KNOWN, DEPTH_FADE = 5, 0.95
# Of what is promised: what is believed at first, as if of so many drafts; the weight of the past;
# and what is believed in any case.
KEPT_FIRST, KEPT_WEIGHT, KEPT_FADE, KEPT_LEAST = 0.8, 20.0, 0.98, 0.5
_CLASS_OF = [max(i for i, least in enumerate(MATCHES) if n >= least) for n in range(3, 33)]


class Averages:
    """One average per class of outcomes. weights: by class, outcomes that its value stands for, of
    which those that it starts from are worth `weight`. `parent`: the averages of all sequences,
    which these start from and teach."""

    __slots__ = ("_weight", "parent", "values", "weights")

    def __init__(
        self, values: Items[float], weight: int = MATCH_WEIGHT, parent: Averages | None = None
    ) -> None:
        self.values = list(values)
        self.weights = [weight] * len(self.values)
        self.parent = parent
        self._weight = weight

    def child(self) -> Averages:
        child = Averages(self.values, self._weight, self)
        most = max(self._weight, OWN_MOST)
        child.weights = [min(weight, most) for weight in self.weights]
        return child

    def note(self, which: int, hit: bool) -> None:
        """One outcome."""
        self._note(which, hit, OWN_RATE)
        if self.parent is not None:
            self.parent._note(which, hit, ALL_RATE)

    def note_hits(self, which: int, n: int) -> None:
        """About the same as n hits one by one."""
        self._note_hits(which, n, OWN_RATE)
        if self.parent is not None:
            self.parent._note_hits(which, n, ALL_RATE)

    def _note_hits(self, which: int, n: int, least: float) -> None:
        weight = self.weights[which] = self.weights[which] + n
        missing = (1.0 - max(least, 1.0 / weight)) ** n
        self.values[which] = 1.0 - (1.0 - self.values[which]) * missing

    def _note(self, which: int, hit: bool, least: float) -> None:
        weight = self.weights[which] = self.weights[which] + 1
        self.values[which] += max(least, 1.0 / weight) * (hit - self.values[which])


class Kept:
    """What drafts keep of what they promise: as many come true, of those that were to."""

    __slots__ = ("_accepted", "_promised", "part")

    def __init__(self) -> None:
        self.part = KEPT_FIRST
        self._promised = KEPT_WEIGHT
        self._accepted = KEPT_FIRST * KEPT_WEIGHT

    def note(self, promised: float, accepted: int) -> None:
        """Of the drafts of a row so many were to come true, and did."""
        self._promised = KEPT_FADE * self._promised + promised
        self._accepted = KEPT_FADE * self._accepted + accepted
        self.part = min(max(self._accepted / self._promised, KEPT_LEAST), 1.0)


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
    values, weights, survival, chance = averages.values, averages.weights, 1.0, 0.0
    result: list[float] = []
    for i in range(n):
        which = i if i < DEPTH_CLASSES else -1
        if not i or weights[which] >= DEPTH_KNOWN:
            chance = values[which]
        else:
            chance *= DEPTH_FADE
        survival *= chance
        if survival < least:
            break
        result.append(survival)
    return result
