"""The header of a KSL1 file.

A KSL1 file is a header of 116 bytes and one byte per layer, the tensors of the text body, and with
flag bit 10 those of the MTP head: no names, no index, no padding, everything little-endian. What
lies where follows from the header alone.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np

from kslserve.ksl.files import fail
from kslserve.ksl.hf_config import LAYERS_MAX

HEADER_BYTES_MAX = 116 + LAYERS_MAX

SIGNATURE = b"KSL1"
OLD_SIGNATURE = b"TQF1"
MIGRATION_HINT = (
    "expected the signature KSL1 at byte 0, found TQF1, the old signature of the same layout: "
    "`kslserve convert --migrate OLD NEW` changes it in place."
)
FIXED_BYTES = 116
FAMILY = 1  # the qwen3_5 text tower
FP16, BF16 = 1, 2
LAYER_TYPES = {1: "linear_attention", 2: "full_attention"}

FLAG_PAYLOADS = 1 << 0
FLAG_TIED = 1 << 1
FLAG_BF16 = 1 << 2
FLAG_NO_VISION = 1 << 3
FLAG_BODY_OMITS_MTP = 1 << 4
FLAG_BLOCK_SCALED = 1 << 5
FLAG_ROW_MAJOR = 1 << 6
FLAG_WORD_MAJOR = 1 << 7
FLAG_E2M3 = 1 << 8
FLAG_SPARSE = 1 << 9
FLAG_MTP = 1 << 10
FLAGS_KNOWN = (1 << 11) - 1
LAYOUTS = FLAG_ROW_MAJOR | FLAG_WORD_MAJOR | FLAG_E2M3

TILE_ROWS = 16
TILE_COLS = 32

_STRUCT = struct.Struct("<4s17I3f8I")


class Header(NamedTuple):
    """All fields in file order. layer_types: one of LAYER_TYPES per layer."""

    header_bytes: int
    flags: int
    model_family: int
    non_quant_dtype: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_key_head_dim: int
    linear_num_value_heads: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    partial_rotary_factor: float
    mrope_interleaved: int
    mrope_section_0: int
    mrope_section_1: int
    mrope_section_2: int
    tie_word_embeddings: int
    text_only: int
    has_vision_config: int
    has_mtp: int
    layer_types: tuple[int, ...]

    @property
    def block_scaled_e2m3(self) -> bool:
        return self.flags & FLAG_BLOCK_SCALED != 0 and self.flags & FLAG_E2M3 != 0

    @property
    def has_mtp_section(self) -> bool:
        return self.flags & FLAG_MTP != 0

    def pack(self) -> bytes:
        return _STRUCT.pack(SIGNATURE, *self[:-1]) + bytes(self.layer_types)


_COUNTS = {  # field: most
    "hidden_size": 1 << 20, "intermediate_size": 1 << 24, "num_hidden_layers": LAYERS_MAX,
    "vocab_size": 1 << 24, "num_attention_heads": 1 << 14, "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14, "linear_num_key_heads": 1 << 14, "linear_key_head_dim": 1 << 14,
    "linear_num_value_heads": 1 << 14, "linear_value_head_dim": 1 << 14,
    "linear_conv_kernel_dim": 64, "max_position_embeddings": 1 << 30,
}  # fmt: skip
_REALS = {"rms_norm_eps": 1.0, "rope_theta": 1e15, "partial_rotary_factor": 1.0}


def offset_of(field: str) -> int:
    """The byte at which a field of the header starts."""
    return 4 + 4 * Header._fields.index(field)


def parse(data: bytes, where: str) -> Header:
    """The header at the start of `data`. ModelFileError names the byte, what was expected and what
    was found."""
    if len(data) < FIXED_BYTES:
        fail(where, f"expected a KSL1 header of {FIXED_BYTES} bytes, found {len(data)} bytes.")
    signature, *values = _STRUCT.unpack_from(data)
    if signature == OLD_SIGNATURE:
        fail(where, MIGRATION_HINT)
    if signature != SIGNATURE:
        fail(where, f"expected the signature KSL1 at byte 0, found {signature!r}.")
    header = Header._make([*values, ()])

    def expect(field: str, good: bool, expected: str) -> None:
        if not good:
            found = getattr(header, field)
            at = offset_of(field)
            fail(where, f"expected {field} at byte {at} to be {expected}, found {found}.")

    expect("model_family", header.model_family == FAMILY, f"{FAMILY} (qwen3_5)")
    for field, most in _COUNTS.items():
        expect(field, 1 <= getattr(header, field) <= most, f"from 1 to {most}")
    for field, limit in _REALS.items():
        value = getattr(header, field)
        good = math.isfinite(value) and 0 < value <= limit
        expect(field, good, f"above 0 and at most {limit:g}")
    layers = header.num_hidden_layers
    expected = FIXED_BYTES + layers
    expect("header_bytes", header.header_bytes == expected, f"{FIXED_BYTES} + {layers} layers")
    for field in ("mrope_interleaved", "tie_word_embeddings", "has_vision_config", "has_mtp"):
        expect(field, getattr(header, field) in (0, 1), "0 or 1")
    expect("text_only", header.text_only == 1, "1")
    _check_flags(header, where)
    if len(data) < expected:
        fail(where, f"expected a header of {expected} bytes, found {len(data)} bytes.")
    types = tuple(data[FIXED_BYTES:expected])
    for index, kind in enumerate(types):
        if kind not in LAYER_TYPES:
            fail(
                where,
                f"expected the type of layer {index} at byte {FIXED_BYTES + index} to be 1 (linear "
                f"attention) or 2 (full attention), found {kind}.",
            )
    return header._replace(layer_types=types)


def _check_flags(header: Header, where: str) -> None:
    flags = header.flags
    label = f"the flags 0x{flags:03x} at byte {offset_of('flags')}"

    def refuse(problem: str) -> None:
        fail(where, f"{label}: {problem}.")

    if flags & ~FLAGS_KNOWN:
        refuse(f"expected bits 0 to 10 only, found 0x{flags & ~FLAGS_KNOWN:x} above them")
    if not flags & FLAG_PAYLOADS:
        refuse("expected bit 0 (matrices as tensor-core payloads), found it clear")
    layouts = flags & LAYOUTS
    if layouts & (layouts - 1):
        refuse("expected at most one of the layout bits 6, 7 and 8, found more")
    if layouts and not flags & FLAG_BLOCK_SCALED:
        refuse("expected bit 5 (block scales) with a layout bit, found it clear")
    if bool(flags & FLAG_TIED) != bool(header.tie_word_embeddings):
        refuse(
            f"expected bit 1 to agree with tie_word_embeddings at byte "
            f"{offset_of('tie_word_embeddings')}, found {header.tie_word_embeddings} there"
        )
    if bool(flags & FLAG_BF16) != (header.non_quant_dtype == BF16):
        refuse(
            f"expected bit 2 to agree with non_quant_dtype at byte "
            f"{offset_of('non_quant_dtype')}, found {header.non_quant_dtype} there"
        )


def check_readable(header: Header, where: str) -> None:
    """Refuse what this version does not read, though the header is right."""
    if header.flags & FLAG_SPARSE:
        fail(
            where,
            f"the flags 0x{header.flags:03x} at byte {offset_of('flags')}: expected no sparse 2:4 "
            "records, found bit 9 set; such files are not read.",
        )
    if header.non_quant_dtype != BF16:
        fail(
            where,
            f"expected bf16 tensors (non_quant_dtype {BF16} at byte "
            f"{offset_of('non_quant_dtype')}), found {header.non_quant_dtype}; only bf16 is read.",
        )


def config_of(header: Header) -> dict[str, Any]:
    """The config.json that says the same."""

    def real(value: float) -> float:
        """The shortest number that is this float32: 1e-6 again, not 9.99999997e-07."""
        return float(str(np.float32(value)))

    return {
        "model_type": "qwen3_5_text",
        "hidden_size": header.hidden_size,
        "intermediate_size": header.intermediate_size,
        "num_hidden_layers": header.num_hidden_layers,
        "layer_types": [LAYER_TYPES[kind] for kind in header.layer_types],
        "num_attention_heads": header.num_attention_heads,
        "num_key_value_heads": header.num_key_value_heads,
        "head_dim": header.head_dim,
        "linear_num_key_heads": header.linear_num_key_heads,
        "linear_num_value_heads": header.linear_num_value_heads,
        "linear_key_head_dim": header.linear_key_head_dim,
        "linear_value_head_dim": header.linear_value_head_dim,
        "linear_conv_kernel_dim": header.linear_conv_kernel_dim,
        "vocab_size": header.vocab_size,
        "max_position_embeddings": header.max_position_embeddings,
        "rms_norm_eps": real(header.rms_norm_eps),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": real(header.rope_theta),
            "partial_rotary_factor": real(header.partial_rotary_factor),
            "mrope_interleaved": bool(header.mrope_interleaved),
            "mrope_section": [getattr(header, f"mrope_section_{n}") for n in range(3)],
        },
        "tie_word_embeddings": bool(header.tie_word_embeddings),
        "mtp_num_hidden_layers": int(header.has_mtp_section),
    }
