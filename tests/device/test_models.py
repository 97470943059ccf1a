"""Golden checkpoints and the bundled model on the device."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kslserve.engine.cuda import CudaLibrary
from kslserve.engine.types import RowKind
from kslserve.ksl.open import open_model
from tests.device.conftest import Opener
from tests.native.driver import Driver
from tests.native.golden import golden_arrays, golden_model
from tests.native.test_bundled import DATA, check_top

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("name", ["g1-tied", "g2-untied"])
def test_goldens(opened: Opener, name: str) -> None:
    golden = golden_arrays(name)
    driver = opened(*golden_model(name))
    stream = driver.begin(0)
    row = stream.row(RowKind.PREFILL, golden["input_ids"])
    found = stream.run(row, ["logits"]).taps["logits"]
    assert np.abs(found - golden["logits"]).max() <= 5e-4
    assert np.linalg.norm(found - golden["logits"]) <= 2e-5 * np.linalg.norm(golden["logits"])
    whole = driver.begin(1)
    first = whole.last(golden["input_ids"])
    assert [first, *whole.decode(63)] == golden["greedy_ids"].tolist()


def test_golden_block_fp8(opened: Opener) -> None:
    golden = golden_arrays("g1-tied-fp8")
    stream = opened(*golden_model("g1-tied-fp8")).begin(0)
    found = stream.run(stream.row(RowKind.PREFILL, golden["input_ids"]), ["logits"]).taps["logits"]
    np.testing.assert_allclose(found, golden["logits"], atol=2e-3)


def test_bundled_model_is_greedy_exact(cuda: CudaLibrary) -> None:
    items = json.loads((DATA / "nano_golden.json").read_text())["items"]
    prompts = [item["prompt_ids"] for item in items]
    per_slot = -(-(max(map(len, prompts)) + 64) // 16)
    with (
        open_model("ksl-nano") as model,
        Driver(
            model.spec,
            model.tensors,
            slots=len(prompts),
            slabs=len(prompts),
            blocks=per_slot * len(prompts),
            blocks_per_slot=per_slot,
            wave_columns=128,
            library=cuda,
        ) as driver,
    ):
        streams = [driver.begin(slot) for slot in range(len(prompts))]
        ids: list[list[int]] = [[] for _ in prompts]
        for stream, prompt in zip(streams, prompts, strict=True):
            stream.prefill(prompt[:-1], [128] * (len(prompt) // 128))
        tokens = [prompt[-1] for prompt in prompts]
        for step in range(64):
            rows = [s.row(RowKind.LAST, [t]) for s, t in zip(streams, tokens, strict=True)]
            result = driver.wave(rows, taps=["logits"] if step == 0 else [])
            if step == 0:
                for logits, item in zip(result.taps["logits"], items, strict=True):
                    check_top(logits, item["first_top5"])
            for stream, row, out in zip(streams, result.rows, ids, strict=True):
                stream.position = row.position
                out += row.tokens
            tokens = [-1] * len(prompts)
    for index, item in enumerate(items):
        assert ids[index] == item["output_ids"], index
