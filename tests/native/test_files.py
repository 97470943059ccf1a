"""The engine opened from each kind of file: the same logits as from the folder quantized at load.
And the Python memory plan against what the engine allocates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kslserve.engine import budget
from kslserve.engine.codecs import ENC_E2M3
from kslserve.engine.model import ModelSpec, TensorArg
from kslserve.engine.native import kv_code_bytes
from kslserve.engine.types import RowKind
from kslserve.ksl.convert import convert
from kslserve.ksl.model import ModelFile
from kslserve.ksl.open import open_model
from tests.native.driver import Driver
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors, wide_spec
from tests.unit.ksl import ksl1_reference as one
from tests.unit.ksl import ksl_reference as reference
from tests.unit.ksl.test_ksl1_write import source_folder

IDS = [3, 77, 151, 20, 9, 188, 64, 64, 130, 1, 45]


def logits(spec: ModelSpec, tensors: list[TensorArg]) -> dict[str, bytes]:
    """Of every position of a prompt, and of the MTP head after it."""
    with Driver(spec, tensors) as driver:
        stream = driver.begin(0)
        first = stream.run(stream.row(RowKind.LAST, IDS), ["logits", "mtp_logits"])
        second = stream.run(stream.row(RowKind.LAST, [-1]), ["logits"])
    taps = {"first": first.taps["logits"], "second": second.taps["logits"]}
    if "mtp_logits" in first.taps:
        taps["mtp"] = first.taps["mtp_logits"]
    for tap in taps.values():
        assert np.isfinite(tap).all()
        assert tap.std() > 0.01
    return {name: tap.tobytes() for name, tap in taps.items()}


def of(model: ModelFile) -> dict[str, bytes]:
    return logits(model.spec, model.tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_the_same_logits_from_every_file(tmp_path: Path, tied: bool) -> None:
    model = one.Model(tied=tied)
    values = model.values()
    folder = source_folder(tmp_path / "m", model, values)
    paths = {weights: str(tmp_path / f"{weights}.ksl") for weights in ("fp6", "nvfp4", "bf16")}
    expected = {}
    for weights, path in paths.items():
        convert(str(folder), path, weights=weights)
        with open_model(str(folder), weights=weights) as opened:
            expected[weights] = of(opened)
        with open_model(path) as opened:
            assert of(opened) == expected[weights], weights
    assert len({e["first"] for e in expected.values()}) == 3
    # KSL1 holds the two gates of linear layers in FP6 too; the policy leaves them in bf16
    convert(str(folder), str(tmp_path / "one.ksl"), file_format="ksl1")
    with open_model(str(folder)) as opened:
        tensors = []
        for arg in opened.tensors:
            if arg.name.endswith(("in_proj_a.weight", "in_proj_b.weight")):
                codes, scales, _ = reference.encode("e2m3", values[arg.name])
                arg = TensorArg(arg.name, ENC_E2M3, arg.rows, arg.cols, codes, scales)
            tensors.append(arg)
        wanted = logits(opened.spec, tensors)
    with open_model(str(tmp_path / "one.ksl")) as opened:
        assert of(opened) == wanted
    assert wanted != expected["fp6"]
    # and a container made of it
    convert(str(tmp_path / "one.ksl"), str(tmp_path / "two.ksl"))
    with open_model(str(tmp_path / "two.ksl")) as opened:
        assert of(opened) == wanted


@pytest.mark.parametrize("kv", ["f32", "bf16", "int8ring_int4"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("activations", ["auto", "float"])
def test_the_memory_plan_is_the_engines(kv: str, threads: int, activations: str) -> None:
    spec = tiny_spec() if kv == "f32" else wide_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "e2m3")
    sizes = {"slots": 6, "slabs": 10, "blocks": 96, "block_tokens": 16, "blocks_per_slot": 16}
    with Driver(
        spec,
        tensors,
        **sizes,
        wave_columns=160,
        kv=kv,
        threads=threads,
        test_hooks=False,
        activations=activations,
    ) as driver:
        info = driver.info
        assert info.slab_bytes == budget.slab_bytes(spec, kv, 64)
        assert info.block_bytes == budget.block_bytes(spec, kv, 16)
        assert info.kv_token_bytes == budget.kv_token_bytes(spec, kv)
        assert info.kv_code_bytes == kv_code_bytes(spec, kv, activations)
        blocks = 96 * 16 * (info.kv_token_bytes + info.kv_code_bytes)
        slabs, slots = 10 * info.slab_bytes, 6 * budget.slot_bytes(spec, 16)
        assert info.pool_bytes == pytest.approx(blocks + slabs + slots, rel=0.02)
        planned = budget.workspace_bytes(spec, 6, 160, threads, activations == "auto", kv)
        # what the plan leaves out are a few structures per slot, column and thread
        assert planned <= info.scratch_bytes <= planned * 1.01 + 64 * 1024
