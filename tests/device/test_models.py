"""Golden checkpoints and the bundled model on the device."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kslserve.engine import codecs
from kslserve.engine.cuda import CudaLibrary
from kslserve.engine.model import TensorArg
from kslserve.engine.types import RowKind
from kslserve.ksl.open import open_model
from tests.device.conftest import Opener
from tests.native import test_bundled as bundled
from tests.native.golden import golden_arrays, golden_model
from tests.native.test_bundled import DATA

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


@pytest.mark.parametrize("chunk", [1, 8, 64, 128])
def test_bundled_model_agrees(opened: Opener, chunk: int) -> None:
    """Its FP6 products round activations, so the golden ids are the likeliest ones, given those
    before them, almost always. Every kernel for a number of tokens."""
    items = json.loads((DATA / "nano_golden.json").read_text())["items"]
    same, total, far = 0, 0, 0.0
    with open_model("ksl-nano") as model:
        driver = opened(
            model.spec,
            model.tensors,
            slots=1,
            slabs=1,
            blocks=40,
            blocks_per_slot=40,
            wave_columns=128,
        )
        for item in items[:: 1 if chunk > 1 else 4]:
            prompt, output = item["prompt_ids"], item["output_ids"]
            stream = driver.begin(0)
            stream.prefill(prompt[:-1], [64] * (len(prompt) // 64))
            ids = [prompt[-1], *output[:-1]]
            for at in range(0, len(ids), chunk):
                row = stream.row(RowKind.PREFILL, ids[at : at + chunk])
                logits = stream.run(row, ["logits"]).taps["logits"]
                same += int((logits.argmax(axis=-1) == output[at : at + chunk]).sum())
                total += len(logits)
                if at == 0:
                    top = {int(token): value for token, value in item["first_top5"]}
                    far = max(far, float(np.abs(logits[0][list(top)] - [*top.values()]).max()))
    print(f"chunk {chunk}: {same} of {total} ids, top logits off by {far:.4f}")
    assert same >= 0.98 * total
    assert far <= 0.1


def in_float32(tensors: list[TensorArg]) -> list[TensorArg]:
    """The values of the tensors, as stored, in float32."""
    found = []
    for t in tensors:
        codes = codecs.encoding_sizes(t.encoding, t.rows, t.cols)[0]
        pieces = [(t.data, t.scales, t.globals_)] if t.read is None else t.read(0, t.rows)
        values = [
            codecs.decode(t.encoding, *part, memoryview(part[0]).nbytes * t.rows // codes, t.cols)
            for part in pieces
        ]
        found.append(TensorArg(t.name, codecs.ENC_F32, t.rows, t.cols, np.concatenate(values)))
    return found


def test_bundled_model_is_exact_in_float32(cuda: CudaLibrary) -> None:
    """Where no product rounds, the greedy ids are the golden ones, and so are the first scores of
    the model and of its MTP head."""
    items = bundled.golden("nano_golden.json")
    prompts = [item["prompt_ids"] for item in items]
    outputs = bundled.run("ksl-nano", "auto", prompts, library=cuda, decode=in_float32)
    bundled.check_exact(outputs, items)
