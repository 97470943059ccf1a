"""The native encoders and decoders against the numpy ones, bit for bit."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_E2M3, ENC_FP8, ENC_NVFP4, ENCODING_NAMES
from kslserve.errors import EngineError
from tests.unit.ksl import ksl_reference as reference

PACKED = (ENC_FP8, ENC_E2M3, ENC_NVFP4)

VALUES = st.floats(-1e4, 1e4, width=32) | st.sampled_from(
    [0.0, -0.0, 1.0, -7.5, 448.0, 5.75, 0.0625, 2.0**-126, 2.0**-140, -(2.0**-149), 3e38, 6.0]
)


def check(encoding: int, w: np.ndarray) -> None:
    rows, cols = w.shape
    found = codecs.encode(encoding, w)
    codes, scales, globals_ = reference.encode(ENCODING_NAMES[encoding], w)
    for ours, theirs in ((found.scales, scales), (found.globals, globals_), (found.codes, codes)):
        if theirs is None:
            assert ours is None
        else:
            assert ours is not None
            assert ours.tobytes() == theirs.tobytes()
    decoded = codecs.decode(encoding, found.codes, found.scales, found.globals, rows, cols)
    again = reference.decode(ENCODING_NAMES[encoding], codes, scales, globals_, rows, cols)
    assert decoded.tobytes() == again.tobytes()


@pytest.mark.parametrize("encoding", PACKED)
@settings(max_examples=50, deadline=None)
@given(
    w=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.integers(1, 3).map(lambda n: 16 * n)),
        elements=VALUES,
        fill=st.just(np.float32(0)),
    )
)
def test_small_matrices_of_awkward_values(encoding: int, w: np.ndarray) -> None:
    check(encoding, w)


@pytest.mark.parametrize("encoding", PACKED)
@pytest.mark.parametrize("shape", [(128, 128), (129, 144), (300, 272), (1, 16), (127, 400)])
def test_blocks_and_their_rests(encoding: int, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(shape[0])
    w = random.normal(size=shape).astype(np.float32)
    w *= np.exp(random.normal(size=(shape[0], 1))).astype(np.float32)
    check(encoding, w)
    # bf16 values: ties are common
    check(encoding, (w.view(np.uint32) & 0xFFFF0000).view(np.float32))
    check(encoding, np.zeros(shape, np.float32))


@pytest.mark.parametrize("encoding", PACKED)
def test_every_code_decodes_alike(encoding: int) -> None:
    rows, cols = 16, 64
    sizes = codecs.encoding_sizes(encoding, rows, cols)
    codes = np.resize(np.arange(256, dtype=np.uint8), sizes[0])
    if encoding == ENC_FP8:
        scales = np.array([0.75], np.float32)
    elif encoding == ENC_E2M3:
        scales = np.array([120], np.uint8)
    else:
        scales = np.arange(sizes[1], dtype=np.uint8) % 127
    globals_ = np.array([0.3], np.float32) if encoding == ENC_NVFP4 else None
    ours = codecs.decode(encoding, codes, scales, globals_, rows, cols)
    name = ENCODING_NAMES[encoding]
    theirs = reference.decode(name, codes, scales, globals_, rows, cols)
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(ours[ours == 0]), np.signbit(theirs[theirs == 0]))


def test_published_vectors_of_e2m3() -> None:
    values = [-0.01, 0.0625, 0.0626, 0.1875, 0.9375, 1.0625, 3.875, 5.75, 7.25, 7.5, -7.5, 0.0]
    codes = [0x20, 0x00, 0x01, 0x01, 0x07, 0x08, 0x17, 0x1B, 0x1E, 0x1F, 0x3F, 0x00]
    found = codecs.encode(ENC_E2M3, np.array([values], np.float32))
    assert reference.unpack6(found.codes).tolist() == [codes]
    assert found.scales is not None
    assert found.scales.tolist() == [[127]]


def test_published_packing_of_four_codes() -> None:
    """Lane 0 of the published tile: rows 0 and 1, columns 0..7 of (7 row + col) mod 64."""
    codes = np.array([[7 * row + col for col in range(8)] for row in (0, 1)])
    lane = np.concatenate(
        [reference.pack6(codes[:, :4])[0], reference.pack6(codes[:, :4])[1],
         reference.pack6(codes[:, 4:])[0], reference.pack6(codes[:, 4:])[1]]
    )  # fmt: skip
    assert lane.tobytes().hex(" ") == "40 20 0c 07 92 28 44 61 1c 0b d3 38"
    tile = np.empty((32, 12), np.uint8)
    grid = (7 * np.arange(16)[:, None] + np.arange(32)) % 64
    for index in range(32):
        row, col = 2 * (index // 4), 8 * (index % 4)
        block = grid[row : row + 2, col : col + 8]
        left, right = reference.pack6(block[:, :4]), reference.pack6(block[:, 4:])
        tile[index] = np.concatenate([left.ravel(), right.ravel()])
    digest = hashlib.sha256(tile.tobytes()).hexdigest()
    assert digest == "60d68f39bd0d216ef37a2b5034cd9ee581d61a0d2c3a951712bbd00bd4e095fc"


@pytest.mark.parametrize("unit", [3, 4])
@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 40), runs=st.integers(0, 5), seed=st.integers(0, 1 << 30))
def test_reorder_moves_units(unit: int, n: int, runs: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    order = rng.permutation(n).astype(np.int32)
    data = rng.integers(0, 256, runs * n * unit).astype(np.uint8)
    expected = data.reshape(runs, n, unit)[:, order].reshape(-1)
    assert (codecs.reorder(order, data, unit) == expected).all()


def test_reorder_refuses_what_it_cannot_do() -> None:
    data = np.zeros(12, np.uint8)
    for order, unit, text in (
        ([0, 3, 1], 4, r"order\[1\] is 3, must be 0 to 2"),
        ([0, -1, 1], 4, r"order\[1\] is -1, must be 0 to 2"),
        ([0, 1], 3, None),
        ([0, 1], 2, "3 bytes|units of 2 bytes"),
        ([0, 1], 4, "12 bytes are no whole runs of 2 units"),
    ):
        array = np.array(order, np.int32)
        if text is None:
            assert codecs.reorder(array, data, unit).size == 12
            continue
        with pytest.raises(EngineError, match=text):
            codecs.reorder(array, data, unit)
