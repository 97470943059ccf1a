"""Detokenizer: ids -> text, one piece at a time, never cutting a character in two."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from kslserve.text.tokenizer import Tokenizer


class Detokenizer:
    """One per generation. Special ids add nothing; every other id adds its bytes. An incomplete
    UTF-8 sequence at the end waits for the next ids; U+FFFD stands only for bytes that cannot be
    part of one.

    held: bytes that wait. texts: of ids that make whole characters, as far as they were asked for;
    while nothing is held, `feed` of such an id is a look-up here."""

    __slots__ = ("_bytes_of", "_size", "_special", "held", "texts")

    def __init__(self, tokenizer: Tokenizer):
        self._bytes_of = tokenizer.bytes_of
        self._size = len(self._bytes_of)
        self._special = tokenizer.special_ids
        self.texts = tokenizer.texts
        self.held = b""

    def feed(self, ids: Sequence[int]) -> str:
        """Text that the ids complete. Ids outside the vocabulary add nothing."""
        if len(ids) == 1 and not self.held:
            text = self.texts.get(ids[0])
            if text is not None:
                return text
            text = self._join(ids)
            if not self.held and 0 <= ids[0] < self._size:
                self.texts[ids[0]] = text
            return text
        return self._join(ids)

    def _join(self, ids: Sequence[int]) -> str:
        bytes_of, size, special = self._bytes_of, self._size, self._special
        return self.feed_bytes(
            b"".join([bytes_of[i] for i in ids if 0 <= i < size and i not in special])
        )

    def feed_bytes(self, piece: bytes) -> str:
        """Text that the bytes complete."""
        if self.held:
            piece = self.held + piece
        text, used = utf_8_decode(piece, "replace", False)
        self.held = piece[used:]
        return text

    def flush(self) -> str:
        """The end: U+FFFD if a sequence was left incomplete, else nothing."""
        held, self.held = self.held, b""
        return held.decode("utf-8", "replace")
