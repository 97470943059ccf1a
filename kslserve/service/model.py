"""ServedModel: what is served, in the few facts that requests and answers need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kslserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served. context: tokens of a request. defaults: sampling of fields a client leaves
    out. fingerprint: names weights, formats and arithmetic; equal ones answer equal requests
    equally. stop_ids: ids that end a turn. vocab: ids below this are valid. created: Unix
    seconds. equality: how far answers depend on how they are computed, by property."""

    name: str
    context: int
    defaults: SamplingParams
    fingerprint: str
    stop_ids: tuple[int, ...]
    vocab: int
    created: int
    equality: Mapping[str, str] = field(default_factory=dict)
