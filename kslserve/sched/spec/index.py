"""SuffixIndex: what followed the last time that a history ended like this.

The newest tokens are searched as bytes, which for some thousand of them takes as long as a few
lines of Python; older ones are in two tables of positions, by the hash of 3 and of 8 tokens, made
at once for many. While what follows a place keeps coming true the place is kept and the match
grows, so that new tokens cost little whatever the history; only a break looks places up again.
Tokens beyond the end of the history are read from the draft itself: a text that repeats with any
period is drafted on for as long as wanted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from kslserve.engine.types import Ids

SHORT, LONG = 3, 8  # tokens that are looked for
LOOK_BACK = 64  # a match that was looked up is measured up to this length
NEAR = 2048  # newest tokens that are searched; up to twice as many before tables are made anew
KNOWN = 1 << 16  # newest places of a long history that tables keep
TRIES = 16  # places that are no token's beginning before a search is given up
_SIZE = 4  # bytes of a token
_FACTOR = 0x9E3779B1
_MIX = 0x85EBCA6B
_MASK = 0xFFFFFFFF
Hashes = npt.NDArray[np.uint32]


class SuffixIndex:
    """at: where what is predicted to follow stands, 0 for nowhere. length: tokens before it that
    are also the last ones of the history, at least SHORT if there are any."""

    __slots__ = ("_old", "_shift", "_tables", "_text", "at", "length")

    def __init__(self, ids: Ids) -> None:
        """ids: int32 [n], the history so far."""
        self._text = bytearray(ids.astype(np.int32, copy=False).tobytes())
        self._old = 0  # tokens that are searched for by tables
        self._shift = 0
        self._tables: dict[int, npt.NDArray[np.int32]] = {}  # by SHORT and LONG
        self.at = self.length = 0
        self._settle()
        self._look()

    def __len__(self) -> int:
        return len(self._text) // _SIZE

    def extend(self, tokens: Items[int]) -> int:
        """Take in what followed; how many of these tokens, one after the other, were predicted."""
        text, at, end = self._text, self.at, len(self)
        new = array("i", tokens)
        text += new.tobytes()
        n = len(new)
        hits = 0
        if at:
            there = self._slice(at, n)
            if there == new:
                hits = n
            else:
                while there[hits] == new[hits]:
                    hits += 1
        if hits == n:
            if n:
                self.at += n
                self.length += n
        else:
            self.at = self.length = 0
        if end + n - self._old > 2 * NEAR:
            self._settle()
        if self.length < LONG:
            self._look()
        return hits

    def draft(self, n: int) -> list[int]:
        """Up to n tokens that are predicted to follow the history: n where there is a match."""
        return self._copy(self.at, n, []) if self.at else []

    def draft_after(self, drafts: Items[int], n: int) -> tuple[list[int], int]:
        """The same for a history that goes on with `drafts`, and the length of that match."""
        if not drafts:
            return self.draft(n), self.length
        if self.at and self._copy(self.at, len(drafts), drafts) == list(drafts):
            return self._copy(self.at + len(drafts), n, drafts), self.length + len(drafts)
        tail = self._text[-LOOK_BACK * _SIZE :] + array("i", drafts).tobytes()
        for size in (LONG, SHORT):
            at = self._find(tail, size)
            if at:
                return self._copy(at, n, drafts), self._match(at, tail)
        return [], 0

    def _slice(self, at: int, n: int) -> array[int]:
        found = array("i")
        found.frombytes(self._text[at * _SIZE : (at + n) * _SIZE])
        return found

    def _look(self) -> None:
        """Find a place for the end of the history."""
        tail = self._text[-LOOK_BACK * _SIZE :]
        for size in (LONG, SHORT):
            if self.length < size:
                at = self._find(tail, size)
                if at:
                    self.at, self.length = at, self._match(at, tail)
                    return

    def _find(self, tail: bytes | bytearray, size: int) -> int:
        """The newest place, 0 for none, before which the last `size` tokens of `tail` stand. There
        is a token."""
        if len(tail) < size * _SIZE:
            return 0
        text, end = self._text, tail[-size * _SIZE :]
        first = max(self._old - size, 0) * _SIZE
        last = len(text) - _SIZE
        for _ in range(TRIES):
            found = text.rfind(end, first, last)
            if found < 0:
                break
            if found % _SIZE == 0:
                return found // _SIZE + size
            last = found + len(end) - 1
        if not self._old:
            return 0
        tokens = array("i")
        tokens.frombytes(end)
        at = int(self._tables[size][_hash(tokens) >> self._shift])
        # Hashes may be equal by chance.
        return at if text[(at - size) * _SIZE : at * _SIZE] == end else 0

    def _match(self, at: int, tail: bytes | bytearray) -> int:
        """How many tokens before place `at` are also the last ones of `tail`."""
        most = min(at, len(tail) // _SIZE, LOOK_BACK)
        text, least = self._text, SHORT
        while least < most:
            n = (least + most + 1) // 2
            if text[(at - n) * _SIZE : at * _SIZE] == tail[-n * _SIZE :]:
                least = n
            else:
                most = n - 1
        return least

    def _copy(self, at: int, n: int, before: Items[int]) -> list[int]:
        """n tokens from place `at` of history + before + what is being copied."""
        found = self._slice(at, n).tolist()
        if len(found) < n:
            text = [*before, *found]
            at += len(found) - len(self)
            while len(found) < n:
                found.append(text[at])
                text.append(text[at])
                at += 1
        return found

    def _settle(self) -> None:
        """Make tables of all but the newest tokens."""
        old = len(self) - NEAR
        if old < NEAR:
            return
        self._old = old
        ids = np.frombuffer(bytes(self._text[: old * _SIZE]), np.int32)[-KNOWN:]
        bits = 1 + len(ids).bit_length()
        self._shift = 32 - bits
        for size, hashes in zip((SHORT, LONG), _hashes(ids), strict=True):
            table = self._tables[size] = np.zeros(1 << bits, np.int32)
            first = old - len(ids) + size
            # Of equal hashes the last one stays.
            table[hashes >> np.uint32(self._shift)] = np.arange(first, first + len(hashes))


def _hash(tokens: Items[int]) -> int:
    """32 bits, the high ones of which depend on all of the tokens."""
    value = 0
    for token in tokens:
        value = (value * _FACTOR + token + 1) & _MASK
    return (value ^ value >> 15) * _MIX & _MASK


def _hashes(ids: Ids) -> tuple[Hashes, Hashes]:
    """`_hash` of the SHORT and of the LONG tokens before every place that has so many before it.
    Longer polynomials are made of shorter ones."""
    word = ids.astype(np.uint32)
    word += np.uint32(1)
    two = word[:-1] * np.uint32(_FACTOR) + word[1:]
    three = two[:-1] * np.uint32(_FACTOR) + word[2:]
    four = two[:-2] * np.uint32(_FACTOR**2 & _MASK) + two[2:]
    eight = four[:-4] * np.uint32(_FACTOR**4 & _MASK) + four[4:]
    return _mixed(three), _mixed(eight)


def _mixed(raw: Hashes) -> Hashes:
    return (raw ^ raw >> np.uint32(15)) * np.uint32(_MIX)
