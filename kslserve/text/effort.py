"""Reasoning effort: the many spellings of clients -> thinking on or off and what the template
knows."""

from __future__ import annotations

# Clients that name no effort at first and one later name `medium`; as effort is written at the very
# start of the prompt, no effort must render the same, or the whole cached prefix would be lost.
DEFAULT = "medium"

_TEMPLATE_EFFORT = {
    "none": DEFAULT,
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "xhigh",
    "xhigh": "xhigh",
    "max": "xhigh",
}


def template_effort(effort: str | None) -> str:
    """`low`, `medium` or `xhigh`. A spelling that we do not know counts as none given."""
    return _TEMPLATE_EFFORT.get(effort.strip().lower(), DEFAULT) if effort else DEFAULT


def template_thinking(thinking: bool | None, effort: str | None) -> bool | None:
    """Thinking on, off, or None for the template's default. A switch of its own wins over effort
    `none`."""
    if thinking is None and effort is not None and effort.strip().lower() == "none":
        return False
    return thinking
