"""Encodings as arrays: sizes, shapes, round trips, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_BF16, ENC_E2M3, ENC_F32, ENC_FP8, ENC_NVFP4
from kslserve.errors import EngineError

ALL = sorted(codecs.ENCODING_NAMES)
# Largest error of one element, relative to the largest magnitude of the matrix.
ERROR = {ENC_F32: 0.0, ENC_BF16: 2**-8, ENC_FP8: 2**-4, ENC_E2M3: 2**-3, ENC_NVFP4: 2**-2}


def matrix(rows: int, cols: int) -> np.ndarray:
    return np.random.default_rng(rows * cols).normal(0, 0.05, (rows, cols)).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 16), (128, 128), (129, 144), (300, 48)])
@pytest.mark.parametrize("encoding", ALL, ids=codecs.ENCODING_NAMES.get)
def test_round_trip(encoding: int, shape: tuple[int, int]) -> None:
    values = matrix(*shape)
    encoded = codecs.encode(encoding, values)
    parts = (encoded.codes, encoded.scales, encoded.globals)
    sizes = tuple(0 if part is None else part.nbytes for part in parts)
    assert sizes == codecs.encoding_sizes(encoding, *shape)
    assert encoded.codes.shape[0] == shape[0]
    decoded = codecs.decode(encoding, *parts, *shape)
    assert decoded.shape == shape
    assert decoded.dtype == np.float32
    assert np.abs(decoded - values).max() <= ERROR[encoding] * np.abs(values).max()
    if encoding != ENC_NVFP4:  # whose scales are not powers of two
        again = codecs.encode(encoding, decoded)
        parts = (again.codes, again.scales, again.globals)
        assert np.array_equal(codecs.decode(encoding, *parts, *shape), decoded)


def test_buffers_may_be_plain_bytes() -> None:
    values = matrix(4, 32)
    encoded = codecs.encode(ENC_E2M3, values)
    assert encoded.scales is not None
    decoded = codecs.decode(
        ENC_E2M3, encoded.codes.tobytes(), bytearray(encoded.scales.tobytes()), None, 4, 32
    )
    assert np.array_equal(
        decoded, codecs.decode(ENC_E2M3, encoded.codes, encoded.scales, None, 4, 32)
    )


def test_other_layouts_are_converted() -> None:
    values = matrix(32, 16)
    expected = codecs.encode(ENC_BF16, values).codes
    assert np.array_equal(codecs.encode(ENC_BF16, np.asfortranarray(values)).codes, expected)
    assert np.array_equal(codecs.encode(ENC_BF16, values.astype(np.float64)).codes, expected)


@pytest.mark.parametrize(
    ("encoding", "rows", "cols", "sizes"),
    [
        (ENC_F32, 3, 5, (60, 0, 0)),
        (ENC_BF16, 3, 5, (30, 0, 0)),
        (ENC_FP8, 129, 130, (129 * 130, 16, 0)),
        (ENC_E2M3, 129, 132, (129 * 99, 4, 0)),
        (ENC_NVFP4, 129, 32, (129 * 16, 258, 8)),
    ],
)
def test_sizes(encoding: int, rows: int, cols: int, sizes: tuple[int, int, int]) -> None:
    assert codecs.encoding_sizes(encoding, rows, cols) == sizes


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(EngineError, match="unknown"):
        codecs.encoding_sizes(9, 4, 4)
    with pytest.raises(EngineError, match="multiple of 4"):
        codecs.encode(ENC_E2M3, matrix(4, 6))
    with pytest.raises(EngineError, match="multiple of 16"):
        codecs.encode(ENC_NVFP4, matrix(4, 24))
    with pytest.raises(EngineError, match="cannot be encoded"):
        codecs.encoding_sizes(ENC_F32, 0, 4)
    with pytest.raises(EngineError, match="matrix"):
        codecs.encode(ENC_F32, np.zeros(4, dtype=np.float32))
    with pytest.raises(EngineError, match="codes of a 4 x 4 f32 matrix take 64 bytes, not 60"):
        codecs.decode(ENC_F32, bytes(60), None, None, 4, 4)
    with pytest.raises(EngineError, match="scales"):
        codecs.decode(ENC_FP8, bytes(16), None, None, 4, 4)
