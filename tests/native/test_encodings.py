"""The native encoder and decoder, bit for bit, against float32 numpy written from the format
description, and against the published test vectors."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_BF16, ENC_E2M3, ENC_FP8, ENC_NVFP4
from kslserve.errors import EngineError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

E2M3 = np.array(
    [m / 8 for m in range(8)] + [(8 + m) / 8 * 2**e for e in range(3) for m in range(8)],
    dtype=np.float32,
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E4M3 = np.array(
    [m * 2.0**-9 for m in range(8)]
    + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)],
    dtype=np.float32,
)[:127]


def nearest(values: F32, grid: F32, tie: str) -> npt.NDArray[np.intp]:
    """Index of the magnitude in `grid` nearest to |value|; tie: down, up or even (code)."""
    magnitude = np.minimum(np.abs(values).astype(np.float64), float(grid[-1]))
    above = np.searchsorted(grid.astype(np.float64), magnitude)
    below = np.maximum(above - 1, 0)
    to_below = magnitude - grid[below]
    to_above = grid[above] - magnitude
    even = np.where(below % 2 == 0, below, above)
    on_tie = {"down": below, "up": above, "even": even}[tie]
    picked = np.where(to_below < to_above, below, above)
    return np.where(to_below == to_above, on_tie, picked)


def signs(values: F32, bit: int) -> U8:
    return (np.signbit(values) * bit).astype(np.uint8)


def block_max(values: F32) -> F32:
    """Largest magnitude of each 128 x 128 block."""
    rows, cols = (-(-n // 128) for n in values.shape)
    padded = np.zeros((rows * 128, cols * 128), dtype=np.float32)
    padded[: values.shape[0], : values.shape[1]] = np.abs(values)
    return padded.reshape(rows, 128, cols, 128).max(axis=(1, 3))


def per_element(scales: npt.NDArray, shape: tuple[int, int]) -> npt.NDArray:
    return np.repeat(np.repeat(scales, 128, 0), 128, 1)[: shape[0], : shape[1]]


def exponents(most: F32, limit: float) -> npt.NDArray[np.int64]:
    """The smallest e with limit * 2^e >= most; 0 for an all-zero block."""
    fraction, e = np.frexp(most.astype(np.float64) / limit)
    return np.where(most == 0, 0, e - (fraction == 0.5)).astype(np.int64)


@st.composite
def matrices(draw: st.DrawFn, multiple: int) -> F32:
    """Up to 270 x 272 values with ties, zeros, outliers and a wide range of magnitudes."""
    rows = draw(st.sampled_from([1, 2, 17, 128, 129, 270]))
    cols = multiple * draw(st.integers(1, 272 // multiple))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = random.normal(0, 1, (rows, cols)).astype(np.float32)
    if draw(st.booleans()):  # land on ties
        values = np.round(values * 32).astype(np.float32) / 32
    values *= np.float32(2.0) ** draw(st.integers(-30, 30))
    if draw(st.booleans()):
        values[random.random(values.shape) < 0.3] = 0
    if draw(st.booleans()):
        values[random.integers(rows), random.integers(cols)] *= 1000
    if draw(st.booleans()):
        values[: rows // 2] = 0
    return values


def test_e2m3_codes_of_the_vectors() -> None:
    pairs = {
        -0.01: 0x20, 0.0625: 0x00, 0.0626: 0x01, 0.1875: 0x01, 0.9375: 0x07, 1.0625: 0x08,
        3.875: 0x17, 5.75: 0x1B, 7.25: 0x1E, 7.5: 0x1F, -7.5: 0x3F,
    }  # fmt: skip
    for value, code in pairs.items():
        row = np.array([[value, 7.5, 0, -7.5]], dtype=np.float32)  # 7.5 keeps the scale at 1
        encoded = codecs.encode(ENC_E2M3, row)
        assert encoded.scales is not None
        assert encoded.scales.tolist() == [[127]]
        word = int.from_bytes(encoded.codes.tobytes(), "little")
        assert [word >> 6 * j & 63 for j in range(4)] == [code, 0x1F, 0x00, 0x3F], value


def test_e2m3_packing_of_the_vectors() -> None:
    """The 16 x 32 tile of the format's test vector, rebuilt from row-major groups of bytes."""
    rows, cols = np.mgrid[0:16, 0:32]
    code = (7 * rows + cols) % 64
    values = (E2M3[code & 31] * np.where(code & 32, -1, 1)).astype(np.float32)
    encoded = codecs.encode(ENC_E2M3, values)
    groups = encoded.codes.reshape(16, 8, 3)
    tile = np.stack(
        [
            groups[2 * (lane // 4) + half % 2, 2 * (lane % 4) + half // 2]
            for lane in range(32)
            for half in range(4)
        ]
    )
    expected = "60d68f39bd0d216ef37a2b5034cd9ee581d61a0d2c3a951712bbd00bd4e095fc"
    assert hashlib.sha256(tile.tobytes()).hexdigest() == expected
    assert tile[:4].tobytes().hex(" ") == "40 20 0c 07 92 28 44 61 1c 0b d3 38"
    decoded = codecs.decode(ENC_E2M3, encoded.codes, encoded.scales, None, 16, 32)
    assert decoded.tobytes() == values.tobytes()  # -0 included


@settings(max_examples=40, deadline=None)
@given(matrices(4))
def test_e2m3(values: F32) -> None:
    encoded = codecs.encode(ENC_E2M3, values)
    e = exponents(block_max(values), 7.5)
    assert encoded.scales is not None
    assert np.array_equal(encoded.scales, (e + 127).astype(np.uint8))
    scale = (2.0 ** per_element(e, values.shape)).astype(np.float32)
    code = nearest(values / scale, E2M3, "down").astype(np.uint8) | signs(values, 32)
    bits = np.unpackbits(code[..., None], axis=-1, bitorder="little")[..., :6]
    packed = np.packbits(bits.reshape(values.shape[0], -1), axis=-1, bitorder="little")
    assert np.array_equal(encoded.codes, packed)
    decoded = codecs.decode(ENC_E2M3, encoded.codes, encoded.scales, None, *values.shape)
    sign = np.where(code & 32, np.float32(-1), np.float32(1))
    assert decoded.tobytes() == (E2M3[code & 31] * sign * scale).tobytes()


@settings(max_examples=40, deadline=None)
@given(matrices(1))
def test_fp8(values: F32) -> None:
    encoded = codecs.encode(ENC_FP8, values)
    scale = (2.0 ** exponents(block_max(values), 448.0)).astype(np.float32)
    assert encoded.scales is not None
    assert np.array_equal(encoded.scales, scale)
    scale = per_element(scale, values.shape)
    code = nearest(values / scale, E4M3, "even").astype(np.uint8) | signs(values, 128)
    assert np.array_equal(encoded.codes, code)
    decoded = codecs.decode(ENC_FP8, encoded.codes, encoded.scales, None, *values.shape)
    sign = np.where(code & 128, np.float32(-1), np.float32(1))
    assert decoded.tobytes() == (E4M3[code & 127] * sign * scale).tobytes()


def test_fp8_scales_may_be_any_float() -> None:
    random = np.random.default_rng(5)
    code = random.integers(0, 127, (130, 257)).astype(np.uint8)
    scales = random.random((2, 3)).astype(np.float32)
    decoded = codecs.decode(ENC_FP8, code, scales, None, 130, 257)
    assert decoded.tobytes() == (E4M3[code] * per_element(scales, code.shape)).tobytes()


@settings(max_examples=40, deadline=None)
@given(matrices(16))
def test_nvfp4(values: F32) -> None:
    rows, cols = values.shape
    encoded = codecs.encode(ENC_NVFP4, values)
    bands = [np.abs(values[r : r + 128]).max() / np.float32(6) for r in range(0, rows, 128)]
    globals_ = np.array([band if band else 1 for band in bands], dtype=np.float32)
    assert encoded.globals is not None
    assert np.array_equal(encoded.globals, globals_)
    band = np.repeat(globals_, 128)[:rows, None]
    most = np.abs(values).reshape(rows, -1, 16).max(axis=2)
    scale = np.maximum(nearest(most / np.float32(6) / band, E4M3, "even"), 1).astype(np.uint8)
    assert encoded.scales is not None
    assert np.array_equal(encoded.scales, scale)
    assert scale.max() <= 0x38
    unit = np.repeat(E4M3[scale] * band, 16, axis=1)
    code = nearest(values / unit, E2M1, "up").astype(np.uint8) | signs(values, 8)
    assert np.array_equal(encoded.codes, code[:, ::2] | code[:, 1::2] << 4)
    decoded = codecs.decode(ENC_NVFP4, encoded.codes, encoded.scales, encoded.globals, rows, cols)
    sign = np.where(code & 8, np.float32(-1), np.float32(1))
    expected = E2M1[code & 7] * sign * np.repeat(E4M3[scale], 16, axis=1) * band
    assert decoded.tobytes() == expected.tobytes()


@settings(max_examples=40, deadline=None)
@given(matrices(1))
def test_bf16(values: F32) -> None:
    encoded = codecs.encode(ENC_BF16, values)
    bits = values.view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    assert encoded.codes.tobytes() == expected.tobytes()
    decoded = codecs.decode(ENC_BF16, encoded.codes, None, None, *values.shape)
    assert decoded.tobytes() == (expected.astype(np.uint32) << 16).tobytes()


@pytest.mark.parametrize("encoding", [ENC_FP8, ENC_E2M3, ENC_NVFP4])
def test_extreme_magnitudes_stay_finite(encoding: int) -> None:
    tiny = np.finfo(np.float32).smallest_subnormal
    huge = np.float32(3e38)
    for magnitude in (tiny, np.float32(1e-40), np.float32(1e-38), huge):
        values = np.full((3, 16), magnitude, dtype=np.float32)
        values[1] = 0
        encoded = codecs.encode(encoding, values)
        decoded = codecs.decode(
            encoding, encoded.codes, encoded.scales, encoded.globals, *values.shape
        )
        assert np.isfinite(decoded).all()
        assert (decoded[1] == 0).all()
        if magnitude == huge:
            assert np.allclose(decoded[0], huge, rtol=0.07)


@pytest.mark.parametrize("encoding", [ENC_FP8, ENC_E2M3, ENC_NVFP4])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_have_no_code_are_refused(encoding: int, value: float) -> None:
    values = np.zeros((2, 16), dtype=np.float32)
    values[1, 3] = value
    with pytest.raises(EngineError, match="row 1, column 3 is not finite"):
        codecs.encode(encoding, values)
