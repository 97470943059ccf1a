"""Generations under a constraint without an engine: ids are drawn from what the masks allow."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kslserve.core.events import Event, TextDelta, ToolCallDelta, ToolCallStart
from kslserve.core.request import Message, Request, ResponseFormat, Role, ToolChoice, ToolSpec
from kslserve.core.usage import FinishReason
from kslserve.parse.stream import OutputParser
from kslserve.service.constrain import Constraint
from kslserve.service.grammar import Grammars
from kslserve.service.guides import Guides
from kslserve.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2] / "data"


@functools.cache
def nano() -> Tokenizer:
    return Tokenizer((DATA / "nano_tokenizer.json").read_bytes())


@functools.cache
def guides() -> Guides:
    """Wider than the vocabulary, as engines are."""
    return Guides(nano(), Grammars(nano(), nano().size + 70))


def request(**fields: Any) -> Request:
    return Request("m", (Message(Role.USER, "x"),), **fields)


def tool(name: str, properties: dict[str, Any], *, strict: bool = True, **more: Any) -> ToolSpec:
    """All parameters are required unless `required` says otherwise."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }
    return ToolSpec(name, {}, parameters, strict=strict)


def id_of(text: str) -> int:
    found = nano().id_of(text)
    assert found is not None
    return found


def ids_of(text: str) -> list[int]:
    return [int(i) for i in nano().encode(text)]


def allowed(mask: Any) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def allows(mask: Any, token: int) -> bool:
    return mask is None or bool(int(mask[token >> 5]) >> (token & 31) & 1)


class Run:
    """One generation. ids: all output. free: what the model says where it may say anything: called
    with the text so far, returns more text, to be sampled token by token."""

    def __init__(
        self,
        wanted: Request,
        *,
        thinking: bool = False,
        seed: int = 0,
        free: Callable[[str], str] = lambda text: "",
    ) -> None:
        self.guide: Constraint = guides().make_now(wanted, thinking)
        self.wanted = wanted
        self.thinking = thinking
        self.ids: list[int] = []
        self.forced: list[int] = []
        self.masked = 0
        self._random = random.Random(seed)
        self._free = free

    def give(self, token: int) -> list[int]:
        """Sample one id, which must be allowed; the ids that it forces."""
        assert self.guide.wait(10.0)
        assert allows(self.guide.mask, token), (self.text, nano().token_bytes(token))
        self.ids.append(token)
        forced = self.guide.advance([token])
        self.ids += forced
        self.forced += forced
        assert self.guide.wait(10.0)
        return forced

    def say(self, text: str) -> None:
        for token in ids_of(text):
            self.give(token)

    def finish(self, most: int = 400) -> str:
        """Draw until the end of the turn; the text."""
        queue: list[int] = []
        while len(self.ids) < most:
            mask = self.guide.mask
            if mask is None or len(choices := allowed(mask)) > nano().size - 100:
                queue = queue or ids_of(self._free(self.text)) or [nano().end_of_turn_ids[0]]
                token = queue.pop(0)
            else:
                queue = []
                self.masked += 1
                assert max(choices) < nano().size
                token = self.draw(choices)
            if token in nano().end_of_turn_ids:
                assert allows(mask, token)
                return self.text
            self.give(token)
        raise AssertionError(f"no end: {self.text[-200:]!r}")

    def draw(self, choices: list[int]) -> int:
        """Closers more often than others, or a random walk may take for ever."""
        ends = [t for t in choices if nano().token_bytes(t)[:1] in (b'"', b"}", b"]", b"\n")]
        ends += [t for t in choices if t in nano().end_of_turn_ids]
        pool = ends if ends and self._random.random() < 0.3 else choices
        return self._random.choice(pool)

    @property
    def text(self) -> str:
        return b"".join(map(nano().token_bytes, self.ids)).decode("utf-8", "replace")

    def events(self, opening: str = "") -> list[Event]:
        parser = OutputParser(self.wanted.tools, thinking=self.thinking, make_id=lambda: "id")
        events = parser.feed(opening + self.text)
        return events + parser.finish(FinishReason.STOP)

    def answer(self) -> str:
        return "".join(e.text for e in self.events() if isinstance(e, TextDelta))

    def calls(self, opening: str = "") -> list[tuple[str, dict[str, Any]]]:
        names, texts = [], []
        for event in self.events(opening):
            if isinstance(event, ToolCallStart):
                names.append(event.name)
                texts.append("")
            elif isinstance(event, ToolCallDelta):
                texts[-1] += event.json
        return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


__all__ = [
    "Guides", "Request", "ResponseFormat", "Run", "ToolChoice", "allowed", "allows", "guides",
    "id_of", "ids_of", "nano", "request", "tool",
]  # fmt: skip
