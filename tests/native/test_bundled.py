"""The bundled model through the engine, against an independent forward (nano_golden.json, made by
make_nano_golden.py) and against the bf16 original's outputs (nano_bf16_golden.json)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from _kslserve import lib

from kslserve.config import load
from kslserve.engine.model import TensorArg
from kslserve.engine.types import RowKind
from kslserve.ksl.open import open_model
from tests.closeness import divergence
from tests.native.driver import Driver

DATA = Path(__file__).resolve().parent.parent / "data"
STEPS = 64
CHUNK = 128
LOGIT_TOLERANCE = 2e-3


def golden(name: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads((DATA / name).read_text())["items"]
    return items


@dataclass
class Outputs:
    """ids: [prompts][64] greedy. logits, draft_logits: [prompts, vocab] of the first step, and of
    the MTP head at the last prompt position, fed with the first output id."""

    ids: list[list[int]]
    logits: npt.NDArray[np.float32]
    draft_logits: npt.NDArray[np.float32]


Decoder = Callable[[list[TensorArg]], list[TensorArg]]


def run(
    model: str,
    weights: str,
    prompts: list[list[int]],
    activations: str = "float",
    *,
    library: Any = lib,
    decode: Decoder = list,
) -> Outputs:
    """All prompts side by side: one decode row each per wave. decode: makes other tensors of the
    model's."""
    block_tokens = 16
    per_slot = -(-(max(len(p) for p in prompts) + STEPS) // block_tokens)
    with (
        open_model(model, weights=weights) as opened,
        Driver(
            opened.spec,
            decode(opened.tensors),
            slots=len(prompts),
            slabs=len(prompts),
            blocks=per_slot * len(prompts),
            block_tokens=block_tokens,
            blocks_per_slot=per_slot,
            wave_columns=CHUNK,
            kv="f32",
            activations=activations,
            threads=2,
            library=library,
        ) as driver,
    ):
        streams = [driver.begin(slot) for slot in range(len(prompts))]
        for stream, prompt in zip(streams, prompts, strict=True):
            stream.prefill(prompt[:-1], [CHUNK] * (len(prompt) // CHUNK))
        ids: list[list[int]] = [[] for _ in prompts]

        def step(tokens: list[int], *taps: str) -> dict[str, npt.NDArray[np.float32]]:
            rows = [s.row(RowKind.LAST, [t]) for s, t in zip(streams, tokens, strict=True)]
            result = driver.wave(rows, taps=taps)
            for stream, row, out in zip(streams, result.rows, ids, strict=True):
                stream.position = row.position
                out += row.tokens
            return result.taps

        logits = step([prompt[-1] for prompt in prompts], "logits")["logits"]
        draft_logits = step([-1] * len(prompts), "mtp_logits")["mtp_logits"]
        for _ in range(STEPS - 2):
            step([-1] * len(prompts))
        return Outputs(ids, logits.copy(), draft_logits.copy())


@pytest.fixture(scope="module")
def fp6() -> Outputs:
    return run("ksl-nano", "auto", [item["prompt_ids"] for item in golden("nano_golden.json")])


@pytest.fixture(scope="module")
def int8() -> Outputs:
    prompts = [item["prompt_ids"] for item in golden("nano_golden.json")]
    return run("ksl-nano", "auto", prompts, "auto")


def check_top(logits: npt.NDArray[np.float32], top: list[list[float]]) -> None:
    """The golden's five have its logits, and nothing else is above them."""
    ids = [int(token) for token, _ in top]
    values = np.array([value for _, value in top])
    assert np.abs(logits[ids] - values).max() <= LOGIT_TOLERANCE
    others = np.delete(logits, ids)
    assert others.max() <= values.min() + LOGIT_TOLERANCE


def check_exact(found: Outputs, items: list[dict[str, Any]]) -> None:
    for index, item in enumerate(items):
        assert found.ids[index] == item["output_ids"], index
        check_top(found.logits[index], item["first_top5"])
        check_top(found.draft_logits[index], item["mtp_first_top5"])


def test_equals_the_independent_forward(fp6: Outputs) -> None:
    check_exact(fp6, golden("nano_golden.json"))


def test_int8_activations_stay_close(fp6: Outputs, int8: Outputs) -> None:
    assert (int8.logits != fp6.logits).any()
    assert (int8.logits.argmax(axis=1) == fp6.logits.argmax(axis=1)).all()
    assert divergence(fp6.logits, int8.logits) < 1e-3


@pytest.mark.parametrize("arithmetic", ["fp6", "int8"])
def test_agrees_with_the_bf16_original(arithmetic: str, request: pytest.FixtureRequest) -> None:
    outputs: Outputs = request.getfixturevalue(arithmetic)
    agreed = {True: 0, False: 0}
    for ids, item in zip(outputs.ids, golden("nano_bf16_golden.json"), strict=True):
        end = STEPS if item["stop_index"] is None else item["stop_index"] + 1
        agreed[item["tools"]] += ids[:end] == item["output_ids"][:end]
    assert agreed[True] == 10
    assert agreed[False] >= 8


@pytest.mark.bf16
def test_the_bf16_original_is_exact() -> None:
    folder = load({}).settings.test_bf16_dir
    if not folder:
        pytest.skip("the setting test_bf16_dir names no folder")
    items = golden("nano_bf16_golden.json")
    check_exact(run(folder, "bf16", [item["prompt_ids"] for item in items]), items)
