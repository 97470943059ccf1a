"""SuffixIndex: what followed the last time that a history ended like this.

Two tables of positions, by the hash of the last 3 and of the last 8 tokens, find the newest earlier
place that ends alike. While what follows there keeps coming true the place is kept and the match
grows, so that one token costs the same whatever the history; only a break looks places up again.
Tokens beyond the end of the history are read from the draft itself: a text that repeats with any
period is drafted on for as long as wanted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from kslserve.engine.types import Ids

SHORT, LONG = 3, 8  # tokens that are hashed
LOOK_BACK = 64  # a match that was looked up is measured up to this length
SPARSE = 8  # every such place of tokens that come at once is kept
KNOWN = 1 << 16  # newest places of a long history that are kept
Hashes = npt.NDArray[np.uint32]
_FACTOR = 0x9E3779B1
_MIX = 0x85EBCA6B
_MASK = 0xFFFFFFFF
_LEAVES_SHORT = pow(_FACTOR, SHORT, 1 << 32)
_LEAVES_LONG = pow(_FACTOR, LONG, 1 << 32)


class SuffixIndex:
    """at: where what is predicted to follow stands, 0 for nowhere. length: tokens before it that
    are also the last ones of the history, at least SHORT if there are any."""

    __slots__ = (
        "_hash_long",
        "_hash_short",
        "_long",
        "_shift",
        "_short",
        "_tokens",
        "at",
        "length",
    )

    def __init__(self, ids: Ids, capacity: int) -> None:
        """ids: int32 [n], the history so far. capacity: length that it may reach."""
        bits = 1 + min(max(capacity, 256), KNOWN).bit_length()
        self._shift = 32 - bits
        self._tokens = array("i", ids.astype(np.int32, copy=False).tobytes())
        self._short = array("i", bytes(4 << bits))
        self._long = array("i", bytes(4 << bits))
        self.at = self.length = 0
        self._hash_short = _raw(self._tokens, SHORT)
        self._hash_long = _raw(self._tokens, LONG)
        newest = ids[-KNOWN:]
        for n, table, hashes in zip(
            (SHORT, LONG), (self._short, self._long), _hashes(newest[:-1]), strict=True
        ):
            hashes >>= np.uint32(self._shift)
            first = len(ids) - len(newest) + n
            # Of equal hashes the last one stays.
            np.frombuffer(table, np.int32)[hashes] = np.arange(first, first + len(hashes))
        self._look()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def predicted(self) -> int:
        """The token that the match predicts. Only where there is one."""
        return self._tokens[self.at]

    def append(self, token: int) -> None:
        """One more token of the history."""
        if self.at and self._tokens[self.at] == token:
            self.at += 1
            self.length += 1
        else:
            self.at = self.length = 0
        self._push(token)
        self._look()

    def follow(self, tokens: Items[int]) -> int:
        """Take the first ones of `tokens`, as many as a long match predicts; how many. Only the
        last of their ends becomes a place: the text is known from where it was copied."""
        own, at = self._tokens, self.at
        if self.length < LONG:
            return 0
        for token in tokens:
            if own[at] != token:
                break
            own.append(token)
            at += 1
        n = at - self.at
        if n:
            self.at = at
            self.length += n
            self._hash_short, self._hash_long = _raw(own, SHORT), _raw(own, LONG)
            self._look()
        return n

    def _push(self, token: int) -> None:
        tokens = self._tokens
        tokens.append(token)
        if len(tokens) > LONG:
            # Both hashes move on by one token: the new one enters, the oldest one leaves.
            self._hash_short = (
                self._hash_short * _FACTOR + token + 1 - (tokens[-1 - SHORT] + 1) * _LEAVES_SHORT
            ) & _MASK
            self._hash_long = (
                self._hash_long * _FACTOR + token + 1 - (tokens[-1 - LONG] + 1) * _LEAVES_LONG
            ) & _MASK
        else:
            self._hash_short = _raw(tokens, SHORT)
            self._hash_long = _raw(tokens, LONG)

    def extend(self, tokens: Items[int]) -> None:
        """Many more at once. That is much cheaper than one by one, since few of them become places;
        so the last few ends, of which one is such a place if the text was here before, are all
        looked up."""
        if not tokens:
            return
        own, shift = self._tokens, self._shift
        first = len(own)
        own.extend(tokens)
        last = len(own)
        self.at = self.length = 0
        end = max(LONG, last - SPARSE + 1)
        value = _raw(own[end - LONG : end], LONG) if end < last else 0
        while end < last:
            at = self._long[((value ^ value >> 15) * _MIX & _MASK) >> shift]
            if at:
                self._try(at + last - end, LONG)
            leaving = (own[end - LONG] + 1) * _LEAVES_LONG
            value = (value * _FACTOR + own[end] + 1 - leaving) & _MASK
            end += 1
        for end in range(max(first, LONG), last, SPARSE):
            head = _raw(own[end - LONG : end - SHORT], LONG - SHORT)
            tail = _raw(own[end - SHORT : end], SHORT)
            self._long[_mix((head * _LEAVES_SHORT + tail) & _MASK) >> shift] = end
            self._short[_mix(tail) >> shift] = end
        self._hash_short, self._hash_long = _raw(own, SHORT), _raw(own, LONG)
        self._look()

    def draft(self, n: int) -> list[int]:
        """Up to n tokens that are predicted to follow the history: n where there is a match."""
        return self._copy(self.at, n, []) if self.at else []

    def draft_after(self, drafts: Items[int], n: int) -> tuple[list[int], int]:
        """The same for a history that goes on with `drafts`, and the length of that match."""
        if not drafts:
            return self.draft(n), self.length
        tokens = self._tokens
        at, length = self.at, self.length
        for i, token in enumerate(drafts):
            place = at + i
            there = tokens[place] if place < len(tokens) else drafts[place - len(tokens)]
            if not at or there != token:
                at = 0
                break
        else:
            if at:
                return self._copy(at + len(drafts), n, drafts), length + len(drafts)
        tail = [*tokens[max(len(tokens) - LONG, 0) :], *drafts]
        for size, table in ((LONG, self._long), (SHORT, self._short)):
            if len(tail) >= size:
                at = table[_mix(_raw(tail, size)) >> self._shift]
                length = self._match(at, [*tokens[max(len(tokens) - LOOK_BACK, 0) :], *drafts])
                if at and length >= size:
                    return self._copy(at, n, drafts), length
        return [], 0

    def _look(self) -> None:
        """Find a place for the end of the history, unless there is a long match, and make this end
        a place for those to come."""
        end, shift = len(self._tokens), self._shift
        if end >= LONG:
            slot = _mix(self._hash_long) >> shift
            if self.length < LONG:
                self._try(self._long[slot], LONG)
            self._long[slot] = end
        if end >= SHORT:
            slot = _mix(self._hash_short) >> shift
            if self.length < SHORT:
                self._try(self._short[slot], SHORT)
            self._short[slot] = end

    def _try(self, at: int, least: int) -> None:
        """Take a place, 0 for none, if it matches at least so many tokens: hashes may be equal by
        chance."""
        if 0 < at < len(self._tokens):
            length = self._match(at, self._tokens)
            if length >= least:
                self.at, self.length = at, length

    def _match(self, at: int, tail: Items[int]) -> int:
        """How many tokens before place `at` are also the last ones of `tail`."""
        tokens = self._tokens
        most = min(at, len(tail), LOOK_BACK)
        back = 0
        while back < most and tokens[at - 1 - back] == tail[-1 - back]:
            back += 1
        return back

    def _copy(self, at: int, n: int, before: Items[int]) -> list[int]:
        """n tokens from place `at` of history + before + what is being copied."""
        tokens = self._tokens
        found = list(tokens[at : at + n])
        if len(found) < n:
            text = [*before, *found]
            at += len(found) - len(tokens)
            while len(found) < n:
                found.append(text[at])
                text.append(text[at])
                at += 1
        return found


def _raw(tokens: Items[int], n: int) -> int:
    """The polynomial of the last n tokens, 32 bits; of fewer, where there are no more."""
    value = 0
    for token in tokens if len(tokens) == n else tokens[-n:]:
        value = (value * _FACTOR + token + 1) & _MASK
    return value


def _mix(raw: int) -> int:
    """32 bits, the high ones of which depend on all of `raw`."""
    return (raw ^ raw >> 15) * _MIX & _MASK


def _hashes(ids: Ids) -> tuple[Hashes, Hashes]:
    """`_mix` of `_raw` of SHORT and of LONG tokens at every end that has so many before it. Longer
    polynomials are made of shorter ones."""
    word = ids.astype(np.uint32)
    word += np.uint32(1)
    two = word[:-1] * np.uint32(_FACTOR) + word[1:]
    three = two[:-1] * np.uint32(_FACTOR) + word[2:]
    four = two[:-2] * np.uint32(_FACTOR**2 & _MASK) + two[2:]
    eight = four[:-4] * np.uint32(_FACTOR**4 & _MASK) + four[4:]
    return _mixed(three), _mixed(eight)


def _mixed(raw: Hashes) -> Hashes:
    return (raw ^ raw >> np.uint32(15)) * np.uint32(_MIX)
