"""Weight encodings written again in numpy from their definitions, to check the native ones against.

encode(name, w) and decode(name, codes, scales, globals, rows, cols) use the container's byte
layouts.
"""

from __future__ import annotations

import numpy as np

E2M3 = np.array(
    [m / 8 if e == 0 else (1 + m / 8) * 2.0 ** (e - 1) for e in range(4) for m in range(8)]
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [
        m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
        for e in range(16)
        for m in range(8)
    ]
)[:127]  # the last code is NaN


def nearest(table: np.ndarray, magnitudes: np.ndarray, ties: str) -> np.ndarray:
    """Index of the nearest entry; ties: down, up or even (index). Beyond the end: the last."""
    high = np.clip(np.searchsorted(table, magnitudes), 1, len(table) - 1)
    low = high - 1
    to_low, to_high = magnitudes - table[low], table[high] - magnitudes
    take_high = to_high < to_low
    tie = to_high == to_low
    if ties == "up":
        take_high |= tie
    elif ties == "even":
        take_high |= tie & (high % 2 == 0)
    return np.where(take_high, high, low)


def blocks_max(w: np.ndarray) -> np.ndarray:
    rows, cols = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
    return np.array(
        [
            [np.abs(w[r * 128 : r * 128 + 128, c * 128 : c * 128 + 128]).max() for c in range(cols)]
            for r in range(rows)
        ]
    )


def power_exponents(peaks: np.ndarray, top: float, low: int) -> np.ndarray:
    """The smallest k with peak <= top * 2^k, at least `low`; 0 for a zero peak."""
    out = np.zeros(peaks.shape, int)
    for index, peak in np.ndenumerate(peaks):
        if peak:
            k = int(np.floor(np.log2(float(peak) / top))) - 2
            while float(peak) > top * 2.0**k:
                k += 1
            out[index] = min(max(k, low), 127)
    return out


def spread(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.repeat(np.repeat(blocks, 128, 0), 128, 1)[: shape[0], : shape[1]]


def encode(name: str, w: np.ndarray):
    w = np.asarray(w, np.float32)
    exact = w.astype(np.float64)
    negative = np.signbit(w)
    if name == "e2m3":
        k = power_exponents(blocks_max(exact), 7.5, -127)
        codes = nearest(E2M3, np.abs(exact) / spread(2.0**k, w.shape), "down") | negative * 32
        return pack6(codes), (k + 127).astype(np.uint8), None
    if name == "fp8":
        k = power_exponents(blocks_max(exact), 448.0, -126)
        codes = nearest(E4M3, np.abs(exact) / spread(2.0**k, w.shape), "even") | negative * 128
        return codes.astype(np.uint8), (2.0**k).astype(np.float32), None
    assert name == "nvfp4"
    peak = np.array([np.abs(w[r : r + 128]).max() for r in range(0, w.shape[0], 128)], np.float32)
    globals_ = np.where(peak == 0, np.float32(1), peak / np.float32(6)).astype(np.float32)
    per_row = np.repeat(globals_, 128)[: w.shape[0], None]
    group = np.abs(w).reshape(w.shape[0], -1, 16).max(2)
    ratio = (group / np.float32(6)) / per_row
    scales = np.maximum(nearest(E4M3, ratio.astype(np.float64), "even"), 1)
    step = np.repeat(E4M3[scales].astype(np.float32) * per_row, 16, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.where(step == 0, np.float32(0), np.abs(w) / step)
    codes = nearest(E2M1, scaled.astype(np.float64), "up") | (negative & (step > 0)) * 8
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    return packed, scales.astype(np.uint8), globals_


def decode(name: str, codes, scales, globals_, rows: int, cols: int) -> np.ndarray:
    codes = np.frombuffer(codes, np.uint8).reshape(rows, -1)
    blocks = (-(-rows // 128), -(-cols // 128))
    if name == "e2m3":
        scale = 2.0 ** (np.frombuffer(scales, np.uint8).astype(int) - 127)
        values = signed(E2M3, unpack6(codes), 32) * spread(scale.reshape(blocks), (rows, cols))
    elif name == "fp8":
        scale = np.frombuffer(scales, np.float32).reshape(blocks).astype(np.float64)
        values = signed(np.append(E4M3, np.nan), codes.astype(int), 128)
        values = values * spread(scale, (rows, cols))
    else:
        assert name == "nvfp4"
        both = np.stack([codes & 15, codes >> 4], 2).reshape(rows, cols).astype(int)
        scale = E4M3[np.frombuffer(scales, np.uint8).reshape(rows, -1)].astype(np.float32)
        per_row = np.repeat(np.frombuffer(globals_, np.float32), 128)[:rows, None]
        # code * scale is exact, so only the product with the global is rounded
        values = signed(E2M1, both, 8) * np.repeat(scale, 16, 1).astype(np.float64) * per_row
    return values.astype(np.float32)


def signed(table: np.ndarray, codes: np.ndarray, sign: int) -> np.ndarray:
    return np.where(codes & sign, -1.0, 1.0) * table[codes & (sign - 1)]


def pack6(codes: np.ndarray) -> np.ndarray:
    c = codes.astype(np.uint32).reshape(codes.shape[0], -1, 4)
    word = c[..., 0] | c[..., 1] << 6 | c[..., 2] << 12 | c[..., 3] << 18
    parts = [word & 255, word >> 8 & 255, word >> 16]
    return np.stack(parts, 2).astype(np.uint8).reshape(codes.shape[0], -1)


def unpack6(packed: np.ndarray) -> np.ndarray:
    b = packed.astype(np.int64).reshape(packed.shape[0], -1, 3)
    word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
    parts = [word >> shift & 63 for shift in (0, 6, 12, 18)]
    return np.stack(parts, 2).reshape(packed.shape[0], -1)
