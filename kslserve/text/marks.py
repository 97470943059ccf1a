"""Marks: how typed text passes through a template without becoming control tokens.

Before rendering, each control token inside typed text gets a break mark after its first character;
so do ends that template text could complete to one. Afterwards the marks are taken out and their
offsets kept. Marks are pairs of a noncharacter and a digit. The noncharacter itself, should a
client send it, is marked too, so nothing that a client sends can be taken for a mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Control tokens of the family's vocabularies: what typed text must not turn into.
CONTROL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|repo_name|>", "<|file_sep|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
    *("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>"),
)

_SIGN = "\ufdd0"
_BREAK = _SIGN + "0"
_LITERAL = _SIGN + "1"
_TURN = _SIGN + "2"
_MARK = re.compile(_SIGN + r"(?:0|1|2(\d+);)")


class Marker:
    """Marks text for one list of control tokens. Immutable."""

    def __init__(self, control_tokens: Iterable[str]):
        tokens = sorted(
            {token for token in control_tokens if len(token) > 1}, key=len, reverse=True
        )
        self._token = re.compile("|".join([_SIGN, *map(re.escape, tokens)]))
        self._heads = frozenset(token[:cut] for token in tokens for cut in range(1, len(token)))
        self._tails = frozenset(token[cut:] for token in tokens for cut in range(1, len(token)))
        self._reach = max((len(token) for token in tokens), default=1)
        # No token, and no part of one at an end, is without one of these characters.
        self._firsts = (_SIGN, *sorted({token[0] for token in tokens}))
        self._lasts = tuple(sorted({token[-1] for token in tokens}))

    def text(self, text: str) -> str:
        """`text` with marks."""
        if any(first in text for first in self._firsts):
            text = self._token.sub(_mark_match, text)
            end = len(text.rstrip())
            if self._touches(text[max(0, end - self._reach + 1) : end], self._heads, at_end=True):
                text = text[:end] + _BREAK + text[end:]
        start = len(text) - len(text.lstrip())
        edge = text[start : start + self._reach - 1]
        if any(last in edge for last in self._lasts) and self._touches(
            edge, self._tails, at_end=False
        ):
            text = text[:start] + _BREAK + text[start:]
        return text

    @staticmethod
    def _touches(edge: str, parts: frozenset[str], *, at_end: bool) -> bool:
        """Is an end (or a beginning) of `edge` one of the parts?"""
        if at_end:
            return any(edge[at:] in parts for at in range(len(edge)))
        return any(edge[: at + 1] in parts for at in range(len(edge)))

    def value(self, value: Any) -> Any:
        """A JSON value with every string in it marked, keys included; the value itself if none
        needs it."""
        if isinstance(value, str):
            return self.text(value)
        # Quotes around strings keep their ends apart from anything, so only whole tokens matter
        # here.
        if self._token.search(json.dumps(value, ensure_ascii=False)) is None:
            return value
        return self._inside(value)

    def _inside(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._token.sub(_mark_match, value)
        if isinstance(value, dict):
            return {self._inside(key): self._inside(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._inside(item) for item in value]
        return value


def turn_mark(index: int) -> str:
    """Stands for a part of the prompt, already marked, that is put in after rendering."""
    return f"{_TURN}{index};"


def resolve(marked: str, turns: Sequence[str] = ()) -> tuple[str, tuple[int, ...]]:
    """(plain text, offsets of the breaks in it), with turn_mark(i) replaced by turns[i]."""
    if _SIGN not in marked:
        return marked, ()
    if turns:
        marked = _MARK.sub(lambda match: turns[int(match[1])] if match[1] else match[0], marked)
    pieces: list[str] = []
    breaks: list[int] = []
    length = start = 0
    for match in _MARK.finditer(marked):
        piece = marked[start : match.start()]
        if match[0] == _LITERAL:
            piece += _SIGN
        pieces.append(piece)
        length += len(piece)
        if match[0] == _BREAK and (not breaks or breaks[-1] != length):
            breaks.append(length)
        start = match.end()
    pieces.append(marked[start:])
    return "".join(pieces), tuple(breaks)


def _mark_match(match: re.Match[str]) -> str:
    found = match[0]
    return _LITERAL if found == _SIGN else found[0] + _BREAK + found[1:]
