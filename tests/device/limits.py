"""How far results of the device may be from those of the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kslserve.engine import codecs
from kslserve.engine.model import TensorArg
from kslserve.ksl import layout

F32 = npt.NDArray[np.float32]

# Relative L2 of a tap. Of float32 everywhere:
EXACT = 5e-5
# Of the first product of activations in halves, before anything can make more of it.
FIRST_PRODUCT = 4e-4
# Long rows: queries, probabilities and unpacked keys are halves.
LONG_TOLERANCE = 1e-3
# Behind a layer whose keys are packed: a difference of a few 1e-4 moves some codes by one.
LAYERS_TOLERANCE = 2e-2

# Rounding to halves may move a tap by ROUNDED in any model, and further where the model makes more
# of it: the norm behind a head whose output is nearly nothing does, in models as small as these, by
# a hundred times. How far it moves is seen of MOVES random roundings; where one such head decides,
# another rounding may move it FACTOR times as far.
HALF = 2.0**-11
ROUNDED, MOVES, FACTOR = 4e-3, 2, 4


def distance(found: F32, expected: F32) -> float:
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    scale = float(np.linalg.norm(expected))
    return float(np.linalg.norm(found - expected)) / (scale if scale > 0 else 1.0)


def rounded_limits(
    shape: str,
    tensors: Sequence[TensorArg],
    expected: Mapping[str, F32],
    run: Callable[[list[TensorArg]], Mapping[str, F32]],
) -> dict[str, float]:
    """By tap. expected: those of the reference; run: what it makes of another model."""
    if shape == "27b-heads":  # none of its heads is nearly nothing
        return dict.fromkeys(expected, LAYERS_TOLERANCE)
    others = [run(_moved_by_halves(tensors, seed)) for seed in range(MOVES)]
    return {
        name: max(ROUNDED, FACTOR * max(distance(other[name], tap) for other in others))
        for name, tap in expected.items()
    }


def _moved_by_halves(tensors: Sequence[TensorArg], seed: int) -> list[TensorArg]:
    """The model in float32, each factor of every product of a matrix moved at random by as much as
    rounding it to a half may. That it is the weight which moves, and not the activation, makes no
    difference to a sum of products."""
    rng = np.random.default_rng(seed)
    return [_moved(tensor, rng) for tensor in tensors]


def _moved(t: TensorArg, rng: np.random.Generator) -> TensorArg:
    values = codecs.decode(t.encoding, t.data, t.scales, t.globals_, t.rows, t.cols)
    if t.cols > 1 and not t.name.endswith("conv1d.weight") and t.name != layout.EMBEDDING:
        values = values * rng.uniform(1 - HALF, 1 + HALF, values.shape).astype(np.float32)
    return replace(t, encoding=codecs.ENC_F32, data=values, scales=None, globals_=None)


def check_taps(
    found: Mapping[str, F32], expected: Mapping[str, F32], limits: Mapping[str, float], what: str
) -> None:
    """AssertionError with the first taps that are too far, in the order in which they arise."""
    assert found.keys() == expected.keys()
    far = {name: distance(found[name], tap) for name, tap in expected.items()}
    worst = max(far, key=lambda name: far[name] / limits[name])
    print(f"{what}: {worst} {far[worst]:.2g} of {limits[worst]:.2g}")
    bad = [(name, far[name], limits[name]) for name in far if not far[name] <= limits[name]]
    assert not bad, f"{what}: first {bad[:5]}"
