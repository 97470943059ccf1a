"""Bytes of everything an engine holds beside its weights: the arithmetic of native/common/budget.cc
and of the CPU backend's activations, and of every KV format.

Pure functions of a model's dimensions; the memory plans at start and of `inspect --plan` are both
made of them.
"""

from __future__ import annotations

from kslserve.engine.model import ModelSpec

# In the order of their numbers in ksl.h.
KV_FORMATS = ("f32", "bf16", "fp8", "q4", "int8_g64", "int4_g32", "int8ring_int4")
KV_OF = {  # what each backend can store
    "cpu": KV_FORMATS,
    "cuda": ("f32", "bf16", "fp8", "q4"),
}
KV_RING_TOKENS = 1024  # positions that int8ring_int4 also keeps in int8, unless it is set

_SCALE = 4  # a float32 per position and KV head
_HALF = 2  # fp16 scales and zero points
_Q4_HEAD_DIMS = (32, 64, 128, 256)
_HEAD_BATCH = 32  # columns that the output head takes at once
_ATTENTION_QUERIES = 256
_TILE_KEYS = 64
_DRAFTS_MAX = 16
_SPARE_BYTES = 64 << 20  # most that the states of rows with drafts may take beside their slabs
# Columns whose MTP keys and values are made together; and how many may wait: so many bytes of
# hidden states, at least and at most.
_MTP_TOGETHER = 128
_MTP_BYTES, _MTP_LEAST, _MTP_MOST = 16 << 20, 256, 4096
_BIAS_MAX = 1024


def kv_layers(spec: ModelSpec) -> int:
    """Layers with a KV cache, the MTP layer's included."""
    return sum(kind == "full" for kind in spec.layer_kinds) + spec.mtp_layers


def kv_problem(spec: ModelSpec, kv: str) -> str | None:
    """Why a format does not take this model's heads, as a sentence; None when it does."""
    dim = spec.head_dim
    if kv == "q4" and dim not in _Q4_HEAD_DIMS:
        return f"q4 takes heads of 32, 64, 128 or 256 dimensions, not {dim}."
    unit = {"int8_g64": 64, "int4_g32": 32, "int8ring_int4": 64}.get(kv, 1)
    if dim % unit:
        return f"{kv} takes heads of a multiple of {unit} dimensions, not {dim}."
    return None


def kv_row_bytes(head_dim: int, kv: str, side: int) -> tuple[int, int]:
    """Bytes of the codes and of the scales of one position in one KV head, K (side 0) or V (1)."""
    d = head_dim
    e4m3 = (d, _SCALE)
    match kv:
        case "f32":
            return 4 * d, 0
        case "bf16":
            return 2 * d, 0
        case "fp8":
            return e4m3
        case "q4":  # K: a scale and a zero point per 32 channels
            return e4m3 if side else (d // 2, d // 32 * 2 * _HALF)
        case "int8_g64":
            return d, d // 64 * _HALF
        case "int4_g32" | "int8ring_int4":
            return d // 2, d // 32 * _HALF
    raise ValueError(f"{kv} is no KV format")


def kv_head_bytes(head_dim: int, kv: str) -> int:
    """Bytes of K and V of one position in one KV head."""
    return sum(kv_row_bytes(head_dim, kv, 0)) + sum(kv_row_bytes(head_dim, kv, 1))


def kv_token_bytes(spec: ModelSpec, kv: str) -> int:
    """Bytes of one token in every KV layer."""
    return kv_layers(spec) * spec.kv_heads * kv_head_bytes(spec.head_dim, kv)


def block_bytes(spec: ModelSpec, kv: str, block_tokens: int) -> int:
    return kv_token_bytes(spec, kv) * block_tokens


def ring_bytes(spec: ModelSpec, kv: str, ring_tokens: int = KV_RING_TOKENS) -> int:
    """Bytes of the KV ring that belongs to a slab: none but for int8ring_int4. The MTP layer has
    no part in it."""
    if kv != "int8ring_int4":
        return 0
    return ring_tokens * (kv_layers(spec) - spec.mtp_layers) * _int8_position_bytes(spec)


def _int8_position_bytes(spec: ModelSpec) -> int:
    return spec.kv_heads * kv_head_bytes(spec.head_dim, "int8_g64")


def slab_bytes(spec: ModelSpec, kv: str = "bf16", ring_tokens: int = KV_RING_TOKENS) -> int:
    """Bytes of one copy of the recurrent state: delta state, conv columns, the last trunk hidden,
    and the KV ring."""
    linear = sum(kind == "linear" for kind in spec.layer_kinds)
    value_width = spec.lin_value_heads * spec.lin_value_dim
    delta = linear * value_width * spec.lin_key_dim
    conv = linear * (spec.conv_taps - 1) * conv_channels(spec)
    return 4 * (delta + conv + spec.hidden) + ring_bytes(spec, kv, ring_tokens)


def conv_channels(spec: ModelSpec) -> int:
    return 2 * spec.lin_key_heads * spec.lin_key_dim + spec.lin_value_heads * spec.lin_value_dim


def slot_bytes(spec: ModelSpec, blocks_per_slot: int) -> int:
    """Bytes of one slot's block tables and sampling state, without its few scalars."""
    words = -(-spec.vocab // 32)
    return 8 * blocks_per_slot + 4 * spec.vocab + 8 * words + 8 * _BIAS_MAX


def workspace_bytes(
    spec: ModelSpec,
    slots: int,
    wave_columns: int,
    threads: int,
    int8: bool = True,
    kv_format: str = "bf16",
) -> int:
    """Bytes of the activations of the widest wave. Mixers, MLP and the MTP join never live at the
    same time, so the largest of them counts. int8: activations are rounded for products."""
    linear_layers = sum(kind == "linear" for kind in spec.layer_kinds)
    value_width = spec.lin_value_heads * spec.lin_value_dim
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    heads = _padded(spec.lin_value_heads) if linear_layers else 0
    conv, value, hidden = _padded(conv_channels(spec)), _padded(value_width), _padded(spec.hidden)
    widest = max(
        2 * conv + 2 * value + 5 * heads if linear_layers else 0,
        _padded(2 * query) + 2 * _padded(kv) + 2 * _padded(query) if kv_layers(spec) else 0,
        2 * _padded(spec.intermediate),
        _padded(2 * spec.hidden),
    )
    floats = wave_columns * (widest + 5 * hidden)
    floats += _HEAD_BATCH * (hidden + _padded(spec.vocab)) + hidden
    kept = min(slots * (1 + _DRAFTS_MAX), wave_columns)
    keys = _padded(spec.lin_key_heads * spec.lin_key_dim)
    floats += kept * linear_layers * (conv + heads + keys + value)  # of rows with drafts
    together = min(_MTP_TOGETHER, wave_columns) if spec.mtp_layers else 0
    if spec.mtp_layers:
        waiting = min(max(_MTP_BYTES // (4 * hidden), _MTP_LEAST), _MTP_MOST)
        floats += waiting * (hidden + 4)
    floats += (wave_columns + slots + together) * (spec.rotary_dims if kv_layers(spec) else 0)
    group = spec.heads // spec.kv_heads
    tile = _padded(group * spec.head_dim + 2 * group)
    # Up to _ATTENTION_QUERIES query heads, of one or more columns, share a pass over a tile.
    queries = 2 * _ATTENTION_QUERIES * (spec.head_dim + 1)
    queries += 2 * _TILE_KEYS * spec.head_dim + 64
    worker = 32 * tile + 2 * spec.vocab + queries
    total = 4 * (floats + threads * worker)
    if int8:
        inputs = [spec.intermediate, spec.hidden * (2 if spec.mtp_layers else 1)]
        inputs += [value_width] if linear_layers else []
        inputs += [query] if kv_layers(spec) else []
        total += wave_columns * quantized_bytes(max(inputs))
    if kv_format != "int8ring_int4" and linear_layers:
        # The state of rows with drafts behind them, if all are accepted.
        slab = slab_bytes(spec)
        total += min(slots, _SPARE_BYTES // slab) * slab
    if kv_format == "int8ring_int4":  # rows on their way into the ring
        layers = kv_layers(spec) - spec.mtp_layers
        total += (wave_columns + kept * layers) * _int8_position_bytes(spec)
    return total


def quantized_bytes(columns: int) -> int:
    """Bytes of one input of a product in int8: codes, and per 32 a scale and a sum, per 16 a
    sum; and in bf16, for weights of that kind."""
    padded = -(-columns // 128) * 128
    return 3 * padded + 8 * padded // 32 + 4 * padded // 16


def _padded(floats: int) -> int:
    return -(-floats // 16) * 16
