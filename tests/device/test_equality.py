"""What the device says of the properties of the determinism contract: equal bits where it says so,
its figures elsewhere, and equal bits in waves as small as it names."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from kslserve.engine.model import ModelSpec, TensorArg
from kslserve.engine.types import Ids
from kslserve.ksl.open import open_model
from tests.device.conftest import Opener
from tests.device.shapes import SEED, spec_named, tensors_of
from tests.native.driver import Driver
from tests.native.properties import EXPERIMENTS, everything, stated
from tests.native.test_bundled import DATA

pytestmark = pytest.mark.cuda

COLUMNS = 200
EQUAL = (0.0, 0.0)
# Random weights carry a difference further than trained ones: logits are then only held to what no
# wrong lane, scale or sign would leave of them.
RANDOM = 0.3


def check(driver: Driver, ids: Ids, most: int, trained: bool) -> None:
    """most: columns of a wave."""
    said, info = stated(driver), driver.info
    for name, pair in everything(driver, ids, most).items():
        print(f"{name}: distance {pair.distance:.3g}, divergence {pair.divergence:.3g}")
        if said[name] == EQUAL:
            assert pair.equal, f"seed {SEED}: {name}"
        elif trained:
            assert pair.distance <= said[name][0], f"seed {SEED}: {name}"
            assert pair.divergence <= said[name][1], f"seed {SEED}: {name}"
        else:
            assert pair.distance <= RANDOM, f"seed {SEED}: {name}"
    if any(far != EQUAL for far in said.values()):
        small = min(most, info.equal_columns or most, info.equal_row or most)
        assert small < most
        for name, pair in everything(driver, ids, small).items():
            assert pair.equal, f"seed {SEED}: {name} in waves of {small}"


@pytest.mark.parametrize(
    ("shape", "policy", "kv", "columns", "activations", "bit"),
    [
        # Small waves, whose kernels are those of 64 columns.
        ("27b-heads", "nvfp4", "q4", 63, "auto", "all"),
        ("27b-heads", "e2m3", "fp8", 63, "auto", "all"),
        ("27b-heads", "bf16", "bf16", 63, "auto", "all"),
        ("sliced", "nvfp4", "q4", 63, "auto", "all"),
        ("sliced", "e2m3", "fp8", 63, "auto", "all"),
        ("sliced", "bf16", "bf16", 63, "auto", "all"),
        ("round", "mixed", "q4", 63, "float", "all"),
        ("tiny", "mixed", "f32", 63, "auto", "all"),
        # Weights and KV that have no other kernels for large waves.
        ("round", "f32", "f32", COLUMNS, "auto", "all"),
        # Long rows only, and not of drafts.
        ("27b-heads", "f32", "q4", COLUMNS, "auto", "speculation"),
        ("27b-heads", "f32", "bf16", COLUMNS, "auto", "speculation"),
        # Products of large waves, with and without long rows.
        ("round", "nvfp4", "f32", COLUMNS, "auto", ""),
        ("round", "bf16", "f32", COLUMNS, "float", ""),
        ("27b-heads", "bf16", "bf16", COLUMNS, "auto", ""),
        ("27b-heads", "nvfp4", "q4", COLUMNS, "auto", ""),
        ("27b-heads", "e2m3", "fp8", COLUMNS, "auto", ""),
        ("27b-heads", "e2m3", "q4", COLUMNS, "float", ""),
        ("27b-heads", "mixed", "fp8", COLUMNS, "auto", ""),
    ],
)
def test_what_is_said_is_so(
    opened: Opener, shape: str, policy: str, kv: str, columns: int, activations: str, bit: str
) -> None:
    """bit: the properties that must be equalities of bits; the engine may claim no other."""
    spec = spec_named(shape)
    tensors = tensors_of(spec, policy, SEED)
    driver = opened(spec, tensors, kv=kv, wave_columns=columns, activations=activations)
    names = [name for name, far in stated(driver).items() if far == EQUAL]
    assert names == (list(EXPERIMENTS) if bit == "all" else bit.split())
    ids = np.random.default_rng(SEED).integers(0, spec.token_limit, COLUMNS).astype(np.int32)
    check(driver, ids, columns, trained=False)


@pytest.fixture(scope="module")
def nano() -> Iterator[tuple[ModelSpec, list[TensorArg]]]:
    with open_model("ksl-nano") as model:
        yield model.spec, model.tensors


@pytest.mark.parametrize("activations", ["auto", "float"])
@pytest.mark.parametrize("kv", ["f32", "bf16", "fp8", "q4"])
def test_figures_on_a_trained_model(
    opened: Opener, nano: tuple[ModelSpec, list[TensorArg]], kv: str, activations: str
) -> None:
    """On text, since logits of ids at random are of nothing."""
    driver = opened(*nano, kv=kv, wave_columns=COLUMNS, activations=activations)
    items = json.loads((DATA / "nano_golden.json").read_text())["items"]
    text = [token for item in items for token in item["prompt_ids"] + item["output_ids"]]
    check(driver, np.array(text[:COLUMNS], np.int32), COLUMNS, trained=True)
