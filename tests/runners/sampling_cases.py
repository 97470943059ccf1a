"""Runs cases of the kinds `sampling`, `sampling_batch` and `logprob_bytes`; the sampler through the
C ABI."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
from _kslserve import ffi, lib

from kslserve.api.chat_encode import logprob_entries
from kslserve.core.events import TokenLogprob
from tests.runners.files import Case

F32 = npt.NDArray[np.float32]
_ORDERS_MAX = 24


class BadLogits(Exception):
    """The sampler refused the logits."""


class Invalid(Exception):
    """The sampler refused a parameter."""


def sample(
    logits: Any,
    *,
    seed: int = 0,
    position: int = 0,
    token_limit: int | None = None,
    mask: npt.NDArray[np.uint32] | None = None,
    prompt_ids: Any = (),
    output_ids: Any = (),
    bias: dict[int, float] | None = None,
    **params: float,
) -> tuple[int, F32]:
    """(sampled id, adjusted logits) of one call."""
    values = np.ascontiguousarray(logits, dtype=np.float32)
    bias = bias or {}
    keep = {
        "prompt_ids": ffi.new("int32_t[]", list(prompt_ids)),
        "output_ids": ffi.new("int32_t[]", list(output_ids)),
        "bias_ids": ffi.new("int32_t[]", list(bias)),
        "bias": ffi.new("float[]", list(bias.values())),
    }
    sampling = ffi.new(
        "ksl_sampling *",
        {
            "seed": seed,
            "temperature": params.get("temperature", 1.0),
            "top_p": params.get("top_p", 1.0),
            "min_p": params.get("min_p", 0.0),
            "presence": params.get("presence_penalty", 0.0),
            "frequency": params.get("frequency_penalty", 0.0),
            "repetition": params.get("repetition_penalty", 1.0),
            "top_k": int(params.get("top_k", 0)),
            "n_prompt": len(prompt_ids),
            "n_output": len(output_ids),
            "n_bias": len(bias),
            **keep,
        },
    )
    chosen = ffi.new("int32_t *")
    adjusted = np.empty_like(values)
    error = ffi.new("ksl_error *")
    code = lib.ksl_sample(
        ffi.from_buffer("float[]", values),
        len(values),
        len(values) if token_limit is None else token_limit,
        sampling,
        ffi.NULL if mask is None else ffi.from_buffer("uint32_t[]", mask),
        position,
        chosen,
        ffi.from_buffer("float[]", adjusted, require_writable=True),
        error,
    )
    if code == lib.KSL_OK:
        return chosen[0], adjusted
    text = ffi.string(error.text).decode()
    raise (BadLogits if "logits have" in text else Invalid)(text)


def drawn(logits: Any, draws: int, **params: Any) -> set[int]:
    """The ids that turn up in so many draws, each with another seed."""
    return {sample(logits, seed=seed, **params)[0] for seed in range(draws)}


def run_sampling(case: Case) -> None:
    _run_row(case, case["expect"])


def run_sampling_batch(case: Case) -> None:
    """Every row by itself, in every order: a row's result is its own."""
    rows = [{**case, **row} for row in case["rows"]]
    for order in itertools.islice(itertools.permutations(rows), _ORDERS_MAX):
        for row in order:
            _run_row(row, row["expect"])


def run_logprob_bytes(case: Case) -> None:
    tokens = [bytes.fromhex(piece) for piece in case["pieces_hex"]]
    entries = [TokenLogprob(token, 0, -1.0, ((token, 0, -1.0),)) for token in tokens]
    content = logprob_entries(entries)
    assert [entry["bytes"] for entry in content] == case["expect"]["bytes"]
    assert [entry["top_logprobs"][0]["bytes"] for entry in content] == case["expect"]["bytes"]


def _run_row(row: dict[str, Any], expect: dict[str, Any]) -> None:
    logits = [float(value) for value in row["logits"]]
    given = {key: row.get(key, ()) for key in ("prompt_ids", "output_ids")} | row["params"]
    if expect.get("error"):
        try:
            sample(logits, **given)
        except BadLogits:
            return
        raise AssertionError("bad logits were sampled")
    seen = drawn(logits, expect.get("draws", 1), **given)
    if "token" in expect:
        assert seen == {expect["token"]}, seen
    if "allowed" in expect:
        assert seen <= set(expect["allowed"]), seen
        assert not expect.get("all_seen") or seen == set(expect["allowed"]), seen
    if "adjusted" in expect:
        adjusted = sample(logits, **given)[1]
        assert np.allclose(adjusted, expect["adjusted"], atol=1e-5), adjusted
