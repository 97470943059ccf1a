"""Token counts and the reason a generation ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class FinishReason(enum.Enum):
    """Why a generation ended, before a dialect gives it a name."""

    STOP = "stop"  # the model ended its turn
    STOP_STRING = "stop_string"
    LENGTH = "length"  # the output limit
    WINDOW = "window"  # the context is full
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Usage:
    """Counts of one request. prompt_tokens includes cached_tokens, which came from a checkpoint,
    and cache_write_tokens, which were computed and can be had from one from now on (known at the
    end); completion_tokens includes reasoning_tokens and end tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
