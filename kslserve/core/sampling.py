"""SamplingParams: how the next token is chosen. Immutable, hashable, validated on construction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kslserve.errors import InvalidRequest

TOP_LOGPROBS_MAX = 20
BIAS_MAX = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Order of application and exact meaning: `ksl_sampling` in native/include/ksl.h.

    seed: None draws a random one at admission. logprobs: None for none, else the number of top
    entries (0..20) reported besides the sampled token. logit_bias: pairs (token id, bias).
    Raises InvalidRequest naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, above=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        # -1 is a common spelling of "off".
        if self.top_k < -1:
            raise InvalidRequest("top_k must be 0 (off) or more.", param="top_k")
        if self.logprobs is not None and not 0 <= self.logprobs <= TOP_LOGPROBS_MAX:
            raise InvalidRequest(
                f"top_logprobs must be between 0 and {TOP_LOGPROBS_MAX}.", param="top_logprobs"
            )
        if len(self.logit_bias) > BIAS_MAX:
            raise InvalidRequest(
                f"logit_bias takes at most {BIAS_MAX} entries.", param="logit_bias"
            )
        for _, bias in self.logit_bias:
            _check("logit_bias", bias, -100.0, 100.0)


def _check(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Raise InvalidRequest unless low <= value <= high (low < value with `above`)."""
    if not math.isfinite(value) or value < low or value > high or (above and value == low):
        relation = "above" if above else "at least"
        raise InvalidRequest(f"{name} must be {relation} {low:g} and at most {high:g}.", param=name)
