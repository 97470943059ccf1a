"""What a `tokenizer.json` says about each id: its bytes, and whether it is a control token.

Byte-level BPE writes every byte as one printable character; `BYTE_OF` turns such text back into
bytes. Added tokens stand as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kslserve.errors import ModelFileError


def _byte_alphabet() -> dict[int, str]:
    """{code point in the file: character of the byte value}; the byte-level alphabet of GPT-2:
    printable Latin-1 bytes stand for themselves, the others follow from U+0100 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {byte: chr(byte) for byte in printable}
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet.update({0x100 + place: chr(byte) for place, byte in enumerate(hidden)})
    return alphabet


BYTE_OF = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """bytes_of[id]: what the id adds to the output (b"" for an id without an entry).
    special: ids flagged special, which never appear in output. control: every added token's text ->
    id. ids: every token's text, in the file's own alphabet, -> id."""

    bytes_of: list[bytes]
    special: frozenset[int]
    control: dict[str, int]
    ids: dict[str, int]


def read_vocabulary(document: dict[str, Any]) -> Vocabulary:
    """Read a parsed `tokenizer.json`. Raises ModelFileError if it is not a byte-level BPE
    tokenizer."""
    model = document.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise ModelFileError("The tokenizer is not a BPE tokenizer.")
    if not _is_byte_level(document):
        raise ModelFileError("The tokenizer does not decode byte-level text.")
    vocab = model.get("vocab")
    added = document.get("added_tokens") or []
    if not isinstance(vocab, dict) or not vocab or not isinstance(added, list):
        raise ModelFileError("The tokenizer has no vocabulary.")
    try:
        control = {str(entry["content"]): int(entry["id"]) for entry in added}
        special = frozenset(int(entry["id"]) for entry in added if entry.get("special"))
        size = 1 + max(*vocab.values(), *control.values(), 0)
        bytes_of = [b""] * size
        for text, token_id in vocab.items():
            bytes_of[token_id] = _bytes_of(text)
        for text, token_id in control.items():
            bytes_of[token_id] = text.encode()
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelFileError(f"The tokenizer's vocabulary is damaged: {error!r}.") from error
    return Vocabulary(bytes_of, special, control, vocab)


def _bytes_of(text: str) -> bytes:
    try:
        return text.translate(BYTE_OF).encode("latin-1")
    except UnicodeEncodeError:
        # Not written in the alphabet: a token put into the vocabulary by hand.
        return text.encode("utf-8", "replace")


def _is_byte_level(document: dict[str, Any]) -> bool:
    decoder = document.get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    return any(isinstance(step, dict) and step.get("type") == "ByteLevel" for step in steps)
