"""`tool_choice` of the OpenAI dialects: what their forms have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kslserve.api.fields import Fields
from kslserve.core.request import ToolChoice

ALLOWED = "allowed_tools"
MODES = ("auto", "required")


@dataclass(frozen=True, slots=True)
class Choice:
    """name: of the tool that must be called. allowed: names of those that may be, None for all."""

    kind: ToolChoice = ToolChoice.AUTO
    name: str | None = None
    allowed: frozenset[str] | None = None


def allowed_choice(entry: Fields, names: Iterable[str]) -> Choice:
    """The choice of an object with `mode` and `tools`; names: of the declared ones among these. No
    tool at all is as good as `none`, and cannot be required."""
    if entry.items("tools") is None:
        entry.refuse("tools", "is required")
    mode = entry.choice("mode", MODES) or "auto"
    found = frozenset(names)
    if not found:
        if mode == "required":
            entry.refuse("tools", "must name a tool that can be called")
        return Choice(ToolChoice.NONE)
    return Choice(ToolChoice(mode), allowed=found)
