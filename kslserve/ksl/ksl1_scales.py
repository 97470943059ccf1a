"""Codes and scales of KSL1 matrices in the encodings that they are handed out in, exactly."""

from __future__ import annotations

import numpy as np

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_BF16, ENC_F32, ENC_FP8, F32, SCALE_BLOCK, U8

FINE = 32  # columns of a scale in the finer grid
BF16_EXACT = 2.0**100  # scales up to this, and from its inverse, keep every product exact in bf16


def coarser(grid: F32, shape: tuple[int, int]) -> F32 | None:
    """The grid of one scale per 128 columns that says the same; None when there is none."""
    group = SCALE_BLOCK // FINE
    wide = np.repeat(grid[:, ::group], group, axis=1)[:, : grid.shape[1]]
    return np.ascontiguousarray(grid[:, ::group]) if (wide == grid).all() else None


def exponents(grid: F32) -> U8 | None:
    """E8M0 bytes of scales that are powers of two from 2^-127 to 2^127; None for others."""
    mantissa, exponent = np.frexp(grid)
    if not (mantissa == 0.5).all() or exponent.min() < -126:
        return None
    return (exponent + 126).astype(np.uint8)


def wide_encoding(grid: F32) -> int:
    """The encoding that holds codes times the scales of a finer grid."""
    powers = (np.frexp(grid)[0] == 0.5).all()
    near = grid.max() <= BF16_EXACT and grid.min() >= 1 / BF16_EXACT
    return ENC_BF16 if powers and near else ENC_F32


def e4m3_of_e2m3() -> U8:
    """The E4M3 code of each E2M3 code: [64]."""
    codes = np.arange(64, dtype=np.uint8)
    exponent, mantissa = codes >> 3 & 3, codes & 7
    normal = ((exponent + 6) << 3 | mantissa).astype(np.uint8)
    # below 1 E2M3 has no leading bit: 1/8, 1/4 + 0/8.., 1/2 + 0..3/8
    small = np.array([0x00, 0x20, 0x28, 0x2C, 0x30, 0x32, 0x34, 0x36], np.uint8)
    return np.where(exponent == 0, small[mantissa], normal) | (codes & 32) << 2


def unpack(packed: U8) -> U8:
    """E2M3 codes, four in three bytes, as one byte each."""
    parts = packed.reshape(-1, 3).astype(np.uint32)
    word = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16
    return (word[:, None] >> np.array([0, 6, 12, 18], np.uint32) & 63).astype(np.uint8).reshape(-1)


def multiply(codes: U8, scales: F32, rows: int, cols: int, encoding: int) -> U8:
    """E4M3 codes times a scale per 32 columns, as bf16 or float32 bytes."""
    ones = np.ones((-(-rows // SCALE_BLOCK), -(-cols // SCALE_BLOCK)), np.float32)
    values = codecs.decode(ENC_FP8, codes, ones, None, rows, cols)
    values *= np.repeat(np.repeat(scales, SCALE_BLOCK, 0)[:rows], FINE, 1)[:, :cols]
    return codecs.encode(encoding, values).codes.reshape(-1)
