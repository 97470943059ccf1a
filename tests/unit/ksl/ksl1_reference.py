"""KSL1 files written and read again, code by code from the description of the format, to check the
package against. Slow and plain; shares nothing with it."""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.unit.ksl import ksl_reference as codecs

HEADER = "<4s17I3f8I"
E2M3, ROW_MAJOR, WORD_MAJOR, BLOCKS, MTP = 0x100, 0x40, 0x80, 0x20, 0x400
PRODUCTION = 0x53D


@functools.cache
def positions(rows: int, cols: int) -> np.ndarray:
    """[tiles, lanes, 16, 2]: (row, column) of code j of each lane of each tile, in file order."""
    out = np.empty((rows // 16 * (cols // 32), 32, 16, 2), int)
    for tile in range(len(out)):
        mt, kt = divmod(tile, cols // 32)
        for lane in range(32):
            g, s = divmod(lane, 4)
            for j in range(16):
                row = 16 * mt + 2 * g + ((j >> 2) & 1)
                out[tile, lane, j] = row, 32 * kt + 8 * s + 4 * (j >> 3) + (j & 3)
    return out


def payload(codes: np.ndarray, flags: int) -> bytes:
    """Codes [rows, cols] in the order of the flags."""
    if flags & ROW_MAJOR:
        return codes.astype(np.uint8).tobytes()
    at = positions(*codes.shape)
    lanes = codes[at[..., 0], at[..., 1]].astype(np.uint64)
    if flags & E2M3:
        out = bytearray()
        for lane in lanes.reshape(-1, 16).tolist():
            bits = 0
            for j, code in enumerate(lane):
                bits |= code << (6 * j)
            out += bits.to_bytes(12, "little")
        return bytes(out)
    data = lanes.astype(np.uint8)
    if flags & WORD_MAJOR:
        data = data.reshape(-1, 32, 4, 4).transpose(0, 2, 1, 3)
    return data.tobytes()


def codes_of(data: bytes, flags: int, rows: int, cols: int) -> np.ndarray:
    """The inverse of `payload`."""
    if flags & ROW_MAJOR:
        return np.frombuffer(data, np.uint8).reshape(rows, cols)
    at = positions(rows, cols)
    if flags & E2M3:
        lanes = [
            [int.from_bytes(data[i : i + 12], "little") >> (6 * j) & 63 for j in range(16)]
            for i in range(0, len(data), 12)
        ]
    else:
        lanes = np.frombuffer(data, np.uint8)
        if flags & WORD_MAJOR:
            lanes = lanes.reshape(-1, 4, 32, 4).transpose(0, 2, 1, 3)
    out = np.empty((rows, cols), np.uint8)
    out[at[..., 0], at[..., 1]] = np.array(lanes, np.uint8).reshape(at.shape[:3])
    return out


@dataclass
class Model:
    """Dimensions as the header has them. layers: 1 or 2 each."""

    hidden: int = 160
    inner: int = 288
    vocab: int = 208
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 32
    key_heads: int = 4
    key_dim: int = 16
    value_heads: int = 16
    value_dim: int = 8
    taps: int = 4
    layers: list[int] = field(default_factory=lambda: [1, 1, 2])
    tied: bool = False

    def tensors(self, mtp: bool) -> list[tuple[str, str, int, int]]:
        """(name, kind, rows, cols) in file order; kind: n (bf16), f (float32), q."""
        h, i, d = self.hidden, self.inner, self.head_dim
        q, kv = self.heads * d, self.kv_heads * d
        value = self.value_heads * self.value_dim
        conv = 2 * self.key_heads * self.key_dim + value
        out = [("model.embed_tokens.weight", "n", self.vocab, h), ("model.norm.weight", "n", h, 1)]
        if not self.tied:
            out.append(("lm_head.weight", "q", self.vocab, h))
        norms = [
            ("input_layernorm.weight", "n", h, 1),
            ("post_attention_layernorm.weight", "n", h, 1),
        ]
        attention = [
            ("self_attn.q_norm.weight", "n", d, 1), ("self_attn.k_norm.weight", "n", d, 1),
            ("self_attn.q_proj.weight", "q", 2 * q, h), ("self_attn.k_proj.weight", "q", kv, h),
            ("self_attn.v_proj.weight", "q", kv, h), ("self_attn.o_proj.weight", "q", h, q),
        ]  # fmt: skip
        linear = [
            ("A_log", "f", self.value_heads, 1), ("dt_bias", "n", self.value_heads, 1),
            ("norm.weight", "f", self.value_dim, 1), ("conv1d.weight", "n", conv, self.taps),
            ("in_proj_a.weight", "q", self.value_heads, h),
            ("in_proj_b.weight", "q", self.value_heads, h),
            ("in_proj_qkv.weight", "q", conv, h), ("in_proj_z.weight", "q", value, h),
            ("out_proj.weight", "q", h, value),
        ]  # fmt: skip
        mlp = [
            ("mlp.gate_proj.weight", "q", i, h), ("mlp.up_proj.weight", "q", i, h),
            ("mlp.down_proj.weight", "q", h, i),
        ]  # fmt: skip
        for number, kind in enumerate(self.layers):
            mixer = attention if kind == 2 else [(f"linear_attn.{n}", *r) for n, *r in linear]
            out += [(f"model.layers.{number}.{n}", *rest) for n, *rest in [*norms, *mlp, *mixer]]
        if mtp:
            out += [(f"mtp.pre_fc_norm_{n}.weight", "n", h, 1) for n in ("embedding", "hidden")]
            out.append(("mtp.fc.weight", "n", h, 2 * h))
            layer = [*norms, *attention, *mlp]
            out += [(f"mtp.layers.0.{n}", "n", rows, cols) for n, _, rows, cols in layer]
            out.append(("mtp.norm.weight", "n", h, 1))
        return out

    def header(self, flags: int, /, **changes: Any) -> bytes:
        values: dict[str, Any] = {
            "signature": b"KSL1", "header_bytes": 116 + len(self.layers),
            "flags": flags | (2 if self.tied else 0), "model_family": 1, "non_quant_dtype": 2,
            "hidden_size": self.hidden, "intermediate_size": self.inner,
            "num_hidden_layers": len(self.layers), "vocab_size": self.vocab,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim, "linear_num_key_heads": self.key_heads,
            "linear_key_head_dim": self.key_dim, "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.value_dim, "linear_conv_kernel_dim": self.taps,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
            "partial_rotary_factor": 0.25, "mrope_interleaved": 1, "m0": 2, "m1": 1, "m2": 1,
            "tie_word_embeddings": int(self.tied), "text_only": 1, "has_vision_config": 0,
            "has_mtp": 1,
        }  # fmt: skip
        layers = changes.pop("layers", self.layers)
        values |= changes
        return struct.pack(HEADER, *values.values()) + bytes(layers)

    def config(self) -> dict[str, Any]:
        """The flat config.json of the same model."""
        kinds = {1: "linear_attention", 2: "full_attention"}
        return {
            "model_type": "qwen3_5_text", "hidden_size": self.hidden,
            "intermediate_size": self.inner, "num_hidden_layers": len(self.layers),
            "layer_types": [kinds[n] for n in self.layers], "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "linear_num_key_heads": self.key_heads, "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim, "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.taps, "vocab_size": self.vocab,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
            "tie_word_embeddings": self.tied, "mtp_num_hidden_layers": 1,
        }  # fmt: skip

    def values(self, seed: int = 3) -> dict[str, np.ndarray]:
        """Values of every tensor, exact in bf16, in the scale of a trained model."""
        random = np.random.default_rng(seed)
        out = {}
        for name, _, rows, cols in self.tensors(mtp=True):
            gain = 0.3 if cols == 1 else 1 / math.sqrt(cols)
            raw = (gain * random.standard_normal((rows, cols))).astype(np.float32)
            raw += np.float32(name.endswith("linear_attn.norm.weight"))
            out[name] = (raw.view(np.uint32) >> 16 << 16).view(np.float32)
        return out


@dataclass
class Matrix:
    """A quantized record: codes [rows, cols] (one byte each), scales float32 [sr, sc] (or one)."""

    codes: np.ndarray
    scales: np.ndarray


def quantize(w: np.ndarray, flags: int, *, ties: str = "down", policy: str = "pow2") -> Matrix:
    """By the converter's rules. ties: of E2M3. policy: pow2 or float."""
    table, top, sign = (codecs.E2M3, 7.5, 32) if flags & E2M3 else (codecs.E4M3, 448.0, 128)
    exact = w.astype(np.float64)
    if not flags & BLOCKS:
        scales = np.array([448 / np.abs(exact).max()], np.float32)
        scaled = np.abs(exact) * scales[0]
    else:
        peaks = codecs.blocks_max(exact)
        ratio = np.where(peaks == 0, 1.0, peaks / top)
        scales = np.exp2(np.ceil(np.log2(ratio))) if policy == "pow2" else ratio
        scales = scales.astype(np.float32)
        scaled = np.abs(exact) / codecs.spread(scales.astype(np.float64), w.shape)
    codes = codecs.nearest(table, scaled, ties if flags & E2M3 else "even")
    return Matrix((codes | np.signbit(w) * sign).astype(np.uint8), scales)


def values_of(matrix: Matrix, flags: int) -> np.ndarray:
    """Exact values as float64."""
    table, sign = (codecs.E2M3, 32) if flags & E2M3 else (np.append(codecs.E4M3, np.nan), 128)
    plain = codecs.signed(table, matrix.codes.astype(int), sign)
    if not flags & BLOCKS:
        return plain / np.float64(matrix.scales[0])
    step = matrix.codes.shape[1] // matrix.scales.shape[1]
    width = 128 if matrix.scales.shape[1] == -(-matrix.codes.shape[1] // 128) else 32
    assert width == 128 or step == 32
    scales = np.repeat(np.repeat(matrix.scales, 128, 0), width, 1)
    return plain * scales[: plain.shape[0], : plain.shape[1]].astype(np.float64)


def record(matrix: Matrix, flags: int) -> bytes:
    head = b"" if not flags & BLOCKS else struct.pack("<II", *matrix.scales.shape)
    return head + matrix.scales.astype("<f4").tobytes() + payload(matrix.codes, flags)


def raw(kind: str, values: np.ndarray) -> bytes:
    if kind == "f":
        return values.astype("<f4").tobytes()
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype("<u2").tobytes()


def write(
    model: Model,
    values: dict[str, np.ndarray],
    matrices: dict[str, Matrix],
    flags: int = PRODUCTION,
    **changes: Any,
) -> bytes:
    """A whole file."""
    out = bytearray(model.header(flags, **changes))
    for name, kind, _, _ in model.tensors(bool(flags & MTP)):
        out += record(matrices[name], flags) if kind == "q" else raw(kind, values[name])
    return bytes(out)


def borders(model: Model, flags: int = PRODUCTION) -> list[int]:
    """Every offset at which something begins or ends."""
    at = [0, 4, 116, 116 + len(model.layers)]
    for _, kind, rows, cols in model.tensors(bool(flags & MTP)):
        start = at[-1]
        if kind != "q":
            at.append(start + rows * cols * (4 if kind == "f" else 2))
            continue
        grid = start + 8 + 4 * -(-rows // 128) * -(-cols // 128)
        at += [start + 4, start + 8, grid, grid + rows * cols * 6 // 8]
    return at


def read(model: Model, data: bytes, flags: int = PRODUCTION) -> dict[str, Any]:
    """The tensors of a file: Matrix or the raw bytes; asserts that every byte is used."""
    at = 116 + len(model.layers)
    out: dict[str, Any] = {}
    for name, kind, rows, cols in model.tensors(bool(flags & MTP)):
        if kind != "q":
            size = rows * cols * (4 if kind == "f" else 2)
            out[name] = data[at : at + size]
        else:
            sr, sc = struct.unpack_from("<II", data, at)
            assert (sr, sc) == (-(-rows // 128), -(-cols // 128)), name
            scales = np.frombuffer(data, "<f4", sr * sc, at + 8).reshape(sr, sc)
            start, size = at + 8 + 4 * sr * sc, rows * cols * (6 if flags & E2M3 else 8) // 8
            codes = codes_of(data[start : start + size], flags, rows, cols)
            out[name] = Matrix(codes, scales)
            size += start - at
        at += size
    assert at == len(data)
    return out
