"""Detokenizer: ids -> text, one piece at a time, never cutting a character in two."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from kslserve.text.tokenizer import Tokenizer


class Detokenizer:
    """One per generation. Special ids add nothing; every other id adds its bytes. An incomplete
    UTF-8 sequence at the end waits for the next ids; U+FFFD stands only for bytes that cannot be
    part of one."""

    __slots__ = ("_bytes_of", "_held", "_size", "_special", "_texts")

    def __init__(self, tokenizer: Tokenizer):
        self._bytes_of = tokenizer.bytes_of
        self._size = len(self._bytes_of)
        self._special = tokenizer.special_ids
        self._texts = tokenizer.texts
        self._held = b""

    def feed(self, ids: Sequence[int]) -> str:
        """Text that the ids complete. Ids outside the vocabulary add nothing."""
        if len(ids) == 1 and not self._held:
            text = self._texts.get(ids[0])
            if text is not None:
                return text
            text = self._join(ids)
            if not self._held and 0 <= ids[0] < self._size:
                self._texts[ids[0]] = text
            return text
        return self._join(ids)

    def known(self, token: int) -> str | None:
        """`feed` of one id whose text was asked for before; None, and it was not fed, where that is
        not known or bytes wait."""
        return None if self._held else self._texts.get(token)

    def _join(self, ids: Sequence[int]) -> str:
        bytes_of, size, special = self._bytes_of, self._size, self._special
        return self.feed_bytes(
            b"".join([bytes_of[i] for i in ids if 0 <= i < size and i not in special])
        )

    def feed_bytes(self, piece: bytes) -> str:
        """Text that the bytes complete."""
        if self._held:
            piece = self._held + piece
        text, used = utf_8_decode(piece, "replace", False)
        self._held = piece[used:]
        return text

    def flush(self) -> str:
        """The end: U+FFFD if a sequence was left incomplete, else nothing."""
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")
