"""Bytes that the CUDA backend takes beside weights, KV blocks and slabs: the arithmetic of
native/cuda/open.cu. What it says is compared with what a device hands out in tests/device."""

from __future__ import annotations

from kslserve.engine.budget import conv_channels, kv_layers
from kslserve.engine.model import ModelSpec

_RUNTIME_BYTES = 320 << 20  # code of kernels, and staging while weights are packed
_GRAPHS, _KERNEL_BYTES, _LAYER_KERNELS, _OTHER_KERNELS = 64, 3 << 10, 8, 16
_SLICES = 8  # parts of a product that its reader adds, at most
_SLICED_COLUMNS = 64  # columns of a wave up to which there are any
_HEAD_BATCH = 32  # columns whose logits exist at one time
_DRAFTS_MAX = 16
_SUPER, _PIECE, _PANEL_SLACK = 256, 64, 256  # native/cuda/common/split.cuh, panel.cuh
_TILE_KEYS = 64
_WAITING = 64  # columns whose MTP keys may wait
_ATTENTION_UNITS = 16384
_LONG_ROW = 64
_MOVE_BYTES = 32 << 20  # state on its way to host memory and back
_CHUNK, _CHUNK_BATCH, _CUTS = 64, 40, 4
_CHUNK_OPERAND_BYTES = 128 * (5 * _CHUNK + 128)


def driver_bytes(spec: ModelSpec) -> int:
    """What the driver takes: code, staging, and as many graphs as are kept."""
    kernels = _LAYER_KERNELS * (spec.layers + spec.mtp_layers) + _OTHER_KERNELS
    return _RUNTIME_BYTES + _GRAPHS * _KERNEL_BYTES * kernels


def device_workspace_bytes(
    spec: ModelSpec, kv: str, slots: int, wave_columns: int, block_tokens: int, blocks_per_slot: int
) -> int:
    """Activations of the widest wave, and what its kernels hand to each other."""
    most = max(wave_columns, slots)
    linear = sum(kind == "linear" for kind in spec.layer_kinds)
    full = kv_layers(spec)
    value = spec.lin_value_heads * spec.lin_value_dim if linear else 0
    query, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    conv, hidden, gates = (
        _padded(conv_channels(spec)) if linear else 0,
        _padded(spec.hidden),
        _padded(spec.lin_value_heads) if linear else 0,
    )
    region = max(
        3 * conv + 3 * _padded(value) + 5 * gates,
        _padded(2 * query) + 2 * _padded(kv_width) + (3 + (kv == "q4")) * _padded(query),
        3 * _padded(spec.intermediate),
        _padded(2 * spec.hidden) if spec.mtp_layers else 0,
    )
    sliced = min(most, _SLICED_COLUMNS)
    floats = most * (5 * hidden + region + (spec.rotary_dims if full else 0))
    floats += max(_SLICES * sliced, most) * hidden
    floats += _HEAD_BATCH * (hidden + 2 * _padded(spec.vocab))
    floats += _WAITING * hidden if spec.mtp_layers else 0
    kept = min(slots * (1 + _DRAFTS_MAX), wave_columns)
    floats += kept * linear * (conv + 2 * gates)
    if full:
        longest = -(-blocks_per_slot * block_tokens // _TILE_KEYS)
        units = min(max(_ATTENTION_UNITS, most), longest * most)
        floats += units * spec.heads * (spec.head_dim + 2)
    total = _MOVE_BYTES + 4 * floats
    for columns, width in (
        (most, spec.hidden), (most, max(value, 1)), (most, max(query, 1)),
        (most, spec.intermediate), (most if spec.mtp_layers else 1, 2 * spec.hidden),
        (_HEAD_BATCH, spec.hidden),
    ):  # fmt: skip
        total += _split_bytes(columns, width)
    if linear and wave_columns >= _LONG_ROW and _has_long_rows(spec, kv):
        chunks = -(-wave_columns // _CHUNK) + (1 + _CUTS) * (wave_columns // _LONG_ROW)
        total += min(chunks, _CHUNK_BATCH) * spec.lin_value_heads * _CHUNK_OPERAND_BYTES
    return total


def _has_long_rows(spec: ModelSpec, kv: str) -> bool:
    """Whether prompt rows have kernels of their own."""
    chunks = spec.lin_key_dim == spec.lin_value_dim == 128
    return chunks and (not kv_layers(spec) or (kv != "f32" and spec.head_dim in (64, 128, 256)))


def _split_bytes(columns: int, width: int) -> int:
    """Inputs of packed products: as two halves, as panels of halves and of e4m3."""
    pieces = -(-width // _SUPER) * (_SUPER // _PIECE)
    halves = 2 * -(-columns // 8) * pieces * _PIECE * 8 + _PANEL_SLACK * _PIECE
    return 2 * halves


def _padded(floats: int) -> int:
    return -(-floats // 16) * 16
