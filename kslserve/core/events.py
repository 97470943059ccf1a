"""What a model did, in order. Parsers make these; each dialect encodes them. No wire format here.

Order in one generation: Started, then any of ReasoningDelta, TextDelta and tool call triples
(ToolCallStart, ToolCallDelta*, ToolCallEnd; calls do not overlap), then Finished or Failed. Text
completions of several prompts come as CompletionDelta and CompletionEnd between the same two ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from kslserve.core.usage import FinishReason, Usage
from kslserve.errors import KslError


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """token bytes, log-probability and the top entries of one sampled position."""

    token: bytes
    token_id: int
    logprob: float
    top: tuple[tuple[bytes, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted: the response head and first event may go out."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str


@dataclass(frozen=True, slots=True)
class LogprobsDelta:
    """Log-probabilities of sampled tokens since the last one; only when asked for."""

    entries: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """index counts calls from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A fragment of the arguments; all fragments of a finished call joined are strict JSON."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    index: int


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """One position of a text completion. logprob: None at the first position of a text. offset: of
    its text, in characters. top: (token bytes, log-probability) of the most likely ones, the token
    itself included."""

    token: bytes
    logprob: float | None
    offset: int
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """A piece of text completion number `index`. ids: its tokens; scores: one for each of them,
    where asked for. prompt: the piece is the prompt repeated."""

    index: int
    text: str
    ids: tuple[int, ...] = ()
    scores: tuple[ScoredToken, ...] = ()
    prompt: bool = False


@dataclass(frozen=True, slots=True)
class CompletionEnd:
    index: int
    reason: FinishReason
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """stop_string: the matched one, if that ended the generation."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    error: KslError
    usage: Usage


Event = (
    Started
    | ReasoningDelta
    | TextDelta
    | LogprobsDelta
    | ToolCallStart
    | ToolCallDelta
    | ToolCallEnd
    | CompletionDelta
    | CompletionEnd
    | Finished
    | Failed
)
