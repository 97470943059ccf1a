"""Sampling parameters as the library takes them, and its reference sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from _kslserve import ffi, lib

from kslserve.engine.types import SlotConfig
from kslserve.errors import EngineError


def sampling_struct(ffi: Any, config: SlotConfig, keep: list[Any]) -> Any:
    """A ksl_sampling, which refers to arrays that are added to `keep`."""
    params = config.sampling
    bias = np.array([b for _, b in params.logit_bias], dtype=np.float32)
    ids = {
        "stop": int32(config.stop_ids),
        "bias": int32([i for i, _ in params.logit_bias]),
        "prompt": int32(config.prompt_ids),
        "output": int32(config.output_ids),
    }
    sampling = ffi.new("ksl_sampling *")
    sampling.seed = config.seed
    sampling.temperature = params.temperature
    sampling.top_p = params.top_p
    sampling.min_p = params.min_p
    sampling.presence = params.presence_penalty
    sampling.frequency = params.frequency_penalty
    sampling.repetition = params.repetition_penalty
    sampling.top_k = max(params.top_k, 0)
    for name, array in ids.items():
        setattr(sampling, f"n_{name}", len(array))
        if len(array):
            setattr(sampling, f"{name}_ids", ffi.from_buffer("int32_t[]", array))
    if len(bias):
        sampling.bias = ffi.from_buffer("float[]", bias)
    keep += [sampling, bias, *ids.values()]
    return sampling


def reference_sample(
    logits: npt.NDArray[np.float32],
    token_limit: int,
    config: SlotConfig,
    position: int,
    mask: npt.NDArray[np.uint32] | None = None,
) -> int:
    """The id that a slot of this configuration samples at `position` from logits [vocab]. mask:
    [ceil(vocab / 32)]. EngineError for logits that give none."""
    keep: list[Any] = [np.ascontiguousarray(logits, np.float32)]
    out, error = ffi.new("int32_t *"), ffi.new("ksl_error *")
    code = lib.ksl_sample(
        ffi.from_buffer("float[]", keep[0]), len(logits), token_limit,
        sampling_struct(ffi, config, keep),
        ffi.NULL if mask is None else ffi.from_buffer("uint32_t[]", mask),
        position, out, ffi.NULL, error,
    )  # fmt: skip
    if code != lib.KSL_OK:
        raise EngineError(ffi.string(error.text).decode())
    return int(out[0])


def int32(ids: Any) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(() if ids is None else ids, dtype=np.int32)
