"""Writing KSL1 files: FP6 E2M3 with a power of two per 128 x 128 block, bf16 for the rest.

Codes are rounded to the nearest magnitude, ties to the smaller one; the scale of a block is the
smallest power of two that keeps its largest value within 7.5, and 1 for a block of zeros. MTP
tensors are bf16. A tied model has no record for its head. The data is as long as the shapes say, so
every stripe can be written where it belongs by whoever has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from kslserve.engine.codecs import (
    ENC_BF16,
    ENC_E2M3,
    ENC_F32,
    ENC_FP8,
    ENCODING_NAMES,
    SCALE_BLOCK,
    U8,
)
from kslserve.ksl import ksl1_header as ksl1
from kslserve.ksl import ksl1_records
from kslserve.ksl.files import fail, quote_path
from kslserve.ksl.ksl1_header import Header
from kslserve.ksl.ksl1_records import Record
from kslserve.ksl.ksl1_tiles import to_tiles
from kslserve.ksl.model import Source
from kslserve.ksl.policy import Planned
from kslserve.ksl.quantize import Stripe

PUBLIC_LAYERS_MAX = 64
_TARGET = {"nq": ENC_BF16, "f32": ENC_F32, "q": ENC_E2M3}
_PLAIN = (ENC_F32, ENC_BF16, ENC_FP8)


@dataclasses.dataclass(frozen=True, slots=True)
class Ksl1Plan:
    """header; tensors in file order; starts: the byte at which each begins; size of the file;
    notes for people."""

    header: Header
    tensors: tuple[Planned, ...]
    records: dict[str, Record]
    starts: dict[str, int]
    size: int
    notes: tuple[str, ...]


def plan_ksl1(source: Source, *, mtp: bool = True) -> Ksl1Plan:
    """What to write. mtp: with the MTP section, if the source has one. ModelFileError names the
    tensor that a KSL1 file cannot hold."""
    where = quote_path(source.where)
    spec = source.spec
    mtp = mtp and spec.mtp_layers > 0
    header = header_of(source, mtp=mtp)
    notes = []
    if spec.layers > PUBLIC_LAYERS_MAX:
        notes.append(f"other readers take at most {PUBLIC_LAYERS_MAX} layers")
    items = ksl1_records.records(spec, source.tied, mtp)
    tensors: list[Planned] = []
    starts: dict[str, int] = {}
    position, rounded = header.header_bytes, 0
    for record in items:
        ksl1_records.check_tiles(record, where)
        target = _TARGET[record.kind]
        stored = source.stored[record.name].encoding
        second = stored not in _PLAIN and stored != target and record.kind == "q"
        if second or (record.kind == "q" and record.name in source.sealed):
            fail(
                where,
                f"{record.name} is quantized already ({ENCODING_NAMES[stored]}), and FP6 made from "
                "it would lose accuracy: convert the original model.",
            )
        rounded += stored == ENC_F32 and target == ENC_BF16
        tensors.append(Planned(record.name, record.name, target, record.rows, record.cols))
        starts[record.name] = position
        position += record.size(header.flags)
    if rounded:
        notes.append(f"{rounded} tensors are float32 in the source and rounded to bf16")
    found = {record.name: record for record in items}
    return Ksl1Plan(header, tuple(tensors), found, starts, position, tuple(notes))


def header_of(source: Source, *, mtp: bool) -> Header:
    """The header of the file that holds this source. mtp: the MTP section is appended."""
    spec = source.spec
    text = source.config.get("text_config") or source.config
    rope = text.get("rope_parameters") or text
    had_mtp = spec.mtp_layers > 0
    flags = (
        ksl1.FLAG_PAYLOADS
        | ksl1.FLAG_BF16
        | ksl1.FLAG_NO_VISION
        | ksl1.FLAG_BLOCK_SCALED
        | ksl1.FLAG_E2M3
        | (ksl1.FLAG_TIED if source.tied else 0)
        | (ksl1.FLAG_BODY_OMITS_MTP if had_mtp else 0)
        | (ksl1.FLAG_MTP if mtp else 0)
    )
    section = rope.get("mrope_section")
    if not isinstance(section, list) or not all(type(n) is int and 0 <= n < 256 for n in section):
        section = []
    section = [*section, 0, 0, 0][:3]
    header = Header(
        header_bytes=ksl1.FIXED_BYTES + spec.layers,
        flags=flags,
        model_family=ksl1.FAMILY,
        non_quant_dtype=ksl1.BF16,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        vocab_size=spec.vocab,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        linear_num_key_heads=spec.lin_key_heads,
        linear_key_head_dim=spec.lin_key_dim,
        linear_num_value_heads=spec.lin_value_heads,
        linear_value_head_dim=spec.lin_value_dim,
        linear_conv_kernel_dim=spec.conv_taps,
        max_position_embeddings=spec.max_positions,
        rms_norm_eps=spec.norm_eps,
        rope_theta=spec.rope_theta,
        partial_rotary_factor=spec.rotary_dims / spec.head_dim,
        mrope_interleaved=int(rope.get("mrope_interleaved") is True),
        mrope_section_0=section[0],
        mrope_section_1=section[1],
        mrope_section_2=section[2],
        tie_word_embeddings=int(source.tied),
        text_only=1,
        has_vision_config=int(bool(source.config.get("vision_config"))),
        has_mtp=int(had_mtp),
        layer_types=tuple(2 if kind == "full" else 1 for kind in spec.layer_kinds),
    )
    # What is written must be what is read: the file's floats are float32.
    return ksl1.parse(header.pack(), quote_path(source.where))


def writer(plan: Ksl1Plan, put: Callable[[int, Any], None]) -> Callable[[Stripe], Stripe]:
    """A `finish` of `quantize.stripes` that writes each stripe with put(position, bytes)."""
    flags = plan.header.flags

    def finish(stripe: Stripe) -> Stripe:
        record = plan.records[stripe.item.name]
        start = plan.starts[record.name]
        codes, scales, _ = stripe.parts
        if record.kind != "q":
            width = record.cols * (2 if record.kind == "nq" else 4)
            put(start + stripe.begin * width, codes)
            return stripe
        assert scales is not None, "E2M3 has scales"
        columns = -(-record.cols // SCALE_BLOCK)
        if stripe.begin == 0:
            put(start, np.array([record.scale_rows, columns], "<u4"))
        grid = _powers(scales)
        put(start + 8 + 4 * columns * (stripe.begin // SCALE_BLOCK), grid)
        width = record.cols * 6 // 8
        payload = to_tiles(codes, flags, stripe.end - stripe.begin, record.cols)
        put(start + record.head_bytes(flags) + stripe.begin * width, payload)
        return stripe

    return finish


def _powers(exponents: U8) -> Any:
    """E8M0 bytes as little-endian float32."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype("<f4")
