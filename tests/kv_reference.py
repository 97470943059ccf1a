"""The KV formats in numpy, written from their definition: the reference that the engine's rows are
compared with bit for bit.

    codes, scales = encode("q4", KEY, x)      # x float32 [rows, d]; bytes as uint8 [rows, .]
    values = decode("q4", KEY, codes, scales, d)

All arithmetic is float32, division is IEEE, rint goes to even.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KEY, VALUE = 0, 1

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

_ZERO_LOW, _ZERO_HIGH, _REACH = -2033, 2048, 2033


def _e4m3_values() -> F32:
    """Values of the 127 finite codes without sign, ascending."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    low = mantissa * 2.0**-9
    high = (8 + mantissa) * 2.0 ** (exponent - 10.0)
    return np.where(exponent == 0, low, high).astype(np.float32)


E4M3 = _e4m3_values()


def to_e4m3(x: F32) -> U8:
    """Nearest code, ties to the even one, saturating at 448."""
    magnitude = np.minimum(np.abs(x), np.float32(448)).astype(np.float64)
    above = np.clip(np.searchsorted(E4M3, magnitude), 1, 126)
    below = above - 1
    up, down = E4M3[above] - magnitude, magnitude - E4M3[below].astype(np.float64)
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code | (np.signbit(x) << 7)).astype(np.uint8)


def from_e4m3(codes: U8) -> F32:
    values = E4M3[codes & 127]
    return np.where(codes & 128, -values, values).astype(np.float32)


def hadamard(d: int) -> npt.NDArray[np.int64]:
    """The natural-order Walsh-Hadamard matrix of size d, entries 1 and -1."""
    one = np.array([[1]])
    while len(one) < d:
        one = np.block([[one, one], [one, -one]])
    return one


def rotate(x: F32) -> F32:
    """Butterflies of stride 1, 2, 4, ... in float32, then one multiplication."""
    d = x.shape[-1]
    x = x.copy()
    stride = 1
    while stride < d:
        pairs = x.reshape(*x.shape[:-1], -1, 2, stride)
        low, high = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = low + high, low - high
        stride *= 2
    return x * np.float32(1 / np.sqrt(np.float64(d)))


def _bytes(array: npt.NDArray[np.generic]) -> U8:
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), -1)


def _nibbles(codes: npt.NDArray[np.integer]) -> U8:
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8).reshape(len(codes), -1)


def _codes(packed: U8, group: int) -> F32:
    pairs = np.stack([packed & 15, packed >> 4], -1)
    return pairs.reshape(len(packed), -1, group).astype(np.float32)


def _encode_fp8(x: F32) -> tuple[U8, U8]:
    most = np.abs(x).max(axis=1).astype(np.float64)
    fraction, exponent = np.frexp(most / 448)
    exponent = np.where(most == 0, 0, np.maximum(exponent - (fraction == 0.5), -126))
    codes = to_e4m3((x * np.ldexp(1.0, -exponent)[:, None]).astype(np.float32))
    return codes, _bytes(np.ldexp(1.0, exponent).astype(np.float32))


def _encode_q4(x: F32) -> tuple[U8, U8]:
    groups = rotate(x).reshape(len(x), -1, 32)
    low, high = groups.min(-1), groups.max(-1) + np.float32(0)  # no negative zero
    reach = np.maximum(np.abs(low), np.abs(high)) / np.float32(_REACH)
    scale = np.maximum((high - low) / np.float32(15), reach).astype(np.float16)
    flat = (low == high) | (scale == 0)
    step = np.where(flat, np.float32(1), scale.astype(np.float32))
    zero = np.clip(np.rint(-low / step), _ZERO_LOW, _ZERO_HIGH).astype(np.float32)
    codes = np.clip(np.rint(groups / step[..., None] + zero[..., None]), 0, 15).astype(np.uint8)
    codes[flat] = 0
    pair = np.stack([np.where(flat, high.astype(np.float16), scale), np.where(flat, -1, zero)], -1)
    return _nibbles(codes), _bytes(pair.astype(np.float16))


def _encode_symmetric(x: F32, group: int, levels: int) -> tuple[npt.NDArray[np.float32], F32]:
    groups = x.reshape(len(x), -1, group)
    most = np.abs(groups).max(-1)
    wanted = np.where(most > 0, most / np.float32(levels), np.float32(1))
    scale = np.minimum(wanted, np.float32(65504)).astype(np.float16).astype(np.float32)
    step = np.where(scale == 0, np.float32(np.inf), scale)  # too small to keep: all codes 0
    return np.clip(np.rint(groups / step[..., None]), -levels, levels), scale


def encode(kv: str, side: int, x: F32) -> tuple[U8, U8]:
    x = np.ascontiguousarray(x, np.float32)
    none = np.empty((len(x), 0), np.uint8)
    if kv == "f32":
        return _bytes(x), none
    if kv == "bf16":
        bits = x.view(np.uint32)
        return _bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)), none
    if kv == "q4" and side == KEY:
        return _encode_q4(x)
    if kv in ("q4", "fp8"):
        return _encode_fp8(x)
    if kv == "int8_g64":
        codes, scale = _encode_symmetric(x, 64, 127)
        return _bytes(codes.astype(np.int8)), _bytes(scale.astype(np.float16))
    codes, scale = _encode_symmetric(x, 32, 7)
    return _nibbles(codes.astype(np.int64) + 8), _bytes(scale.astype(np.float16))


def decode(kv: str, side: int, codes: U8, scales: U8, d: int) -> F32:
    """Float32 [rows, d]; a rotated K stays rotated."""
    rows = len(codes)
    if kv == "f32":
        return codes.view(np.float32)
    if kv == "bf16":
        return (codes.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if kv == "fp8" or (kv == "q4" and side == VALUE):
        return from_e4m3(codes) * scales.view(np.float32)
    halves = scales.view(np.float16).astype(np.float32)
    if kv == "q4":
        pair = halves.reshape(rows, -1, 2)
        return ((_codes(codes, 32) - pair[..., 1:]) * pair[..., :1]).reshape(rows, d)
    if kv == "int8_g64":
        values = codes.view(np.int8).astype(np.float32).reshape(rows, -1, 64)
    else:
        values = _codes(codes, 32) - 8
    return (values * halves[..., None]).reshape(rows, d)
