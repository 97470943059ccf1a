"""What the stages of a constraint have in common: the vocabulary's landmarks, the rules of one
generation, and the shape of a stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kslserve import log
from kslserve.core.request import ToolSpec
from kslserve.service.grammar import Grammars
from kslserve.service.toolgrammar import ToolGrammar
from kslserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.uint32]
_log = log.get("constrain")


class Kit:
    """What all constraints of a server share. Immutable after construction."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self.tokenizer = tokenizer
        self.grammars = grammars
        self.think_close = _id_of(tokenizer, "</think>")
        self.call_open = _id_of(tokenizer, "<tool_call>")
        self.call_close = _id_of(tokenizer, "</tool_call>")
        self.breaks = {
            token: len(text)
            for token, text in enumerate(tokenizer.bytes_of)
            if text in (b"\n", b"\n\n")
        }
        end = tokenizer.end_of_turn_ids
        self.no_end = self._all_but(end)
        # Before there is any text neither special tokens nor the tags of reasoning are an answer.
        think = (_id_of(tokenizer, "<think>"), self.think_close)
        self.not_empty = self._all_but((*end, *think, *sorted(tokenizer.special_ids)))
        self.blank = grammars.ids("\n\n")
        self._close = [self.think_close, *self.blank]
        self._break_close = [*grammars.ids("\n"), *self._close]

    def closing(self, last: int) -> list[int]:
        """The ids that end reasoning whose last id is `last`."""
        at_break = self.tokenizer.token_bytes(last).endswith(b"\n")
        return self._close if at_break else self._break_close

    def _all_but(self, ids: Iterable[int]) -> Mask:
        mask = np.full(self.grammars.words, 0xFFFFFFFF, np.uint32)
        for token in ids:
            mask[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
        mask.flags.writeable = False
        return mask


def _id_of(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.id_of(text)
    assert found is not None, text  # require_control_ids was called
    return found


@dataclass(slots=True)
class Rules:
    """What one generation is held to. reasoning: it starts inside of it; budget: most tokens there.
    answer: matcher of the whole answer. tools: those that may be called, none when calls are off;
    names_held: a call must be of one of them. strict: grammars by name. name_opened: it starts
    behind `<function=`; call: it starts inside a call of this tool."""

    reasoning: bool = False
    budget: int | None = None
    answer: LLMatcher | None = None
    tools: dict[str, ToolSpec] = field(default_factory=dict)
    strict: dict[str, ToolGrammar] = field(default_factory=dict)
    names_held: bool = False
    name_opened: bool = False
    call: str | None = None


class Owner(Protocol):
    """What a stage knows of its constraint."""

    kit: Kit
    rules: Rules
    mask: Mask | None

    def force(self, ids: list[int]) -> None:
        """These ids come next, whatever the model says."""


class Stage:
    """What the next id may be. held: `matcher` makes the mask, so the stage belongs to the workers;
    of other stages it is `constant` (None for no mask)."""

    held = False
    matcher: LLMatcher | None = None
    constant: Mask | None = None

    def open(self) -> Stage:
        """For the workers, of a held stage: what costs time before its first mask. Returns the
        stage that it turns out to be."""
        return self

    def take(self, token: int) -> Stage:
        """The stage after an id."""
        return self

    def extra(self) -> Iterable[int]:
        """Ids allowed besides those of the matcher."""
        return ()


def refused(owner: Owner, matcher: LLMatcher, token: int) -> Stage:
    """After an id that the matcher did not take. If the mask did not allow it either, it was forced
    and not sampled, and from here on there is nothing to hold on to.
    Raises ValueError if the matcher is at fault."""
    mask = owner.mask
    if mask is None or int(mask[token >> 5]) >> (token & 31) & 1:
        raise ValueError(matcher.get_error()[:300])
    _log.warning("an id outside of the mask was sampled", token=token)
    return Stage()
