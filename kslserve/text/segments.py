"""SegmentCache: ids of a prompt, of which most was tokenized for an earlier one.

A request repeats the conversation so far. Between control tokens a text's ids depend on nothing
outside it, so prompts are cut there and the ids of each segment are kept by its text: exact, and a
warm turn tokenizes only what is new.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kslserve.text.rendered import Rendered
from kslserve.text.tokenizer import Ids, Tokenizer

CACHE_BYTES = 64 << 20
_ENTRY_BYTES = 256  # of an entry beside its text and its ids


@dataclass(frozen=True, slots=True, eq=False)
class Splice:
    """ids: int32, take the place of the text from `start` to `end`, both offsets of control
    tokens' first characters."""

    start: int
    end: int
    ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Segmented:
    """ids: int32 [n]. boundaries: those of the rendered prompt as numbers of tokens, ascending."""

    ids: Ids
    boundaries: tuple[int, ...]


class SegmentCache:
    """max_bytes bounds texts and ids kept; the least recently used ones go first. Safe to use from
    several threads."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        self._segments: OrderedDict[str, Ids] = OrderedDict()
        self._single: dict[int, Ids] = {}

    @property
    def size_bytes(self) -> int:
        """Size of what is kept."""
        return self._bytes

    def encode(self, rendered: Rendered, splices: Iterable[Splice] = ()) -> Segmented:
        """The ids of `Tokenizer.encode_rendered`, with splices (ascending, apart) put in. A
        boundary that is not at an edge of a control token moves to the last one before it. Raises
        ValueError for a splice that does not start and end at control tokens."""
        text = rendered.text
        parts: list[Ids | str] = []  # a text stands for its ids
        marks = [0]  # offsets at which a part ends
        waiting = list(splices)[::-1]
        at = 0
        inside = 0  # offset up to which a splice covers the text
        for start, end, token in self._tokenizer.controls(text, rendered.breaks):
            if start < inside:
                continue
            if inside:
                if start != inside:
                    raise ValueError("A splice ends inside a text.")
                at, inside = start, 0
            parts.append(text[at:start])
            marks.append(start)
            at = start
            if waiting and waiting[-1].start == start:
                splice = waiting.pop()
                parts.append(splice.ids)
                inside = splice.end
                marks.append(inside)
                continue
            parts.append(self._one(token))
            marks.append(end)
            at = end
        if waiting or inside:
            raise ValueError("A splice does not lie between control tokens.")
        parts.append(text[at:])
        marks.append(len(text))
        return self._join(parts, marks, rendered.boundaries)

    def _join(
        self, parts: list[Ids | str], marks: list[int], boundaries: Sequence[int]
    ) -> Segmented:
        known = self._lookup([part for part in parts if isinstance(part, str)])
        arrays = [known[part] if isinstance(part, str) else part for part in parts]
        totals = np.cumsum([0, *map(len, arrays)])
        counts = (int(totals[bisect_right(marks, offset) - 1]) for offset in boundaries)
        return Segmented(np.concatenate(arrays), tuple(dict.fromkeys(counts)))

    def _lookup(self, texts: list[str]) -> dict[str, Ids]:
        """Ids of each text; those that are not kept are encoded in one call."""
        segments = self._segments
        known: dict[str, Ids] = {}
        missing: dict[str, None] = {}
        with self._lock:
            for text in texts:
                ids = segments.get(text)
                if ids is None:
                    missing[text] = None
                else:
                    segments.move_to_end(text)
                    known[text] = ids
        if missing:
            encoded = self._tokenizer.encode_plain(list(missing))
            made = {t: np.array(e, np.int32) for t, e in zip(missing, encoded, strict=True)}
            known.update(made)
            with self._lock:
                for text, ids in made.items():
                    self._keep(text, ids)
        return known

    def _keep(self, text: str, ids: Ids) -> None:
        size = _size(text, ids)
        if size > self._max_bytes or text in self._segments:
            return
        self._segments[text] = ids
        self._bytes += size
        while self._bytes > self._max_bytes:
            old_text, old_ids = self._segments.popitem(last=False)
            self._bytes -= _size(old_text, old_ids)

    def _one(self, token: int) -> Ids:
        found = self._single.get(token)
        if found is None:
            found = self._single[token] = np.array([token], np.int32)
        return found


def _size(text: str, ids: Ids) -> int:
    return sys.getsizeof(text) + ids.nbytes + _ENTRY_BYTES
