"""The tensors of a text tower: canonical names, shapes and roles (what a policy may re-encode)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from kslserve.engine.codecs import ENC_BF16, ENC_F32
from kslserve.engine.model import ModelSpec
from kslserve.ksl.files import fail, quote

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """How a source holds one tensor: encoding (ENC_*), rows, cols (1 for a vector)."""

    encoding: int
    rows: int
    cols: int


def expected(spec: ModelSpec) -> dict[str, Shape]:
    """Name to [rows, cols] of every tensor but the head, in file order: embedding, layers, final
    norm, MTP. Vectors have cols 1; conv1d is [channels, taps]."""
    shapes: dict[str, Shape] = {EMBEDDING: (spec.vocab, spec.hidden)}
    for index, kind in enumerate(spec.layer_kinds):
        shapes |= _layer(spec, f"model.layers.{index}.", kind)
    hidden = (spec.hidden, 1)
    shapes["model.norm.weight"] = hidden
    if spec.mtp_layers:
        shapes["mtp.fc.weight"] = (spec.hidden, 2 * spec.hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{name}.weight"] = hidden
        shapes |= _layer(spec, "mtp.layers.0.", "full")
    return shapes


def _layer(spec: ModelSpec, prefix: str, kind: str) -> dict[str, Shape]:
    hidden, inner = spec.hidden, spec.intermediate
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden, 1)}
    if kind == "full":
        query, value = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shapes |= {
            "self_attn.q_proj.weight": (2 * query, hidden),
            "self_attn.k_proj.weight": (value, hidden),
            "self_attn.v_proj.weight": (value, hidden),
            "self_attn.o_proj.weight": (hidden, query),
            "self_attn.q_norm.weight": (spec.head_dim, 1),
            "self_attn.k_norm.weight": (spec.head_dim, 1),
        }
    else:
        heads, value = spec.lin_value_heads, spec.lin_value_heads * spec.lin_value_dim
        channels = 2 * spec.lin_key_heads * spec.lin_key_dim + value
        shapes |= {
            "linear_attn.in_proj_qkv.weight": (channels, hidden),
            "linear_attn.in_proj_z.weight": (value, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            "linear_attn.conv1d.weight": (channels, spec.conv_taps),
            "linear_attn.A_log": (heads, 1),
            "linear_attn.dt_bias": (heads, 1),
            "linear_attn.norm.weight": (spec.lin_value_dim, 1),
            "linear_attn.out_proj.weight": (hidden, value),
        }
    shapes |= {
        "post_attention_layernorm.weight": (hidden, 1),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def is_conv(name: str) -> bool:
    return name.endswith(".conv1d.weight")


def role(name: str) -> str | None:
    """`head`, `mtp`, `mlp` or `projection` for a matrix that a policy re-encodes; None for what
    stays as the source has it (embedding, in_proj_a/b, conv, norms, A_log, dt_bias)."""
    if name == HEAD:
        return "head"
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf not in _MATRICES:
        return None
    if name.startswith("mtp."):
        return "mtp"
    return "mlp" if ".mlp." in name else "projection"


_MATRICES = frozenset(
    ("gate_proj", "up_proj", "down_proj", "q_proj", "k_proj", "v_proj", "o_proj",
     "in_proj_qkv", "in_proj_z", "out_proj", "fc")
)  # fmt: skip


def settle_mtp(spec: ModelSpec, names: Mapping[str, object], notes: list[str]) -> ModelSpec:
    """The spec with mtp_layers as the tensors have it; a disagreement adds a note."""
    present = any(name.startswith("mtp.") for name in names)
    if spec.mtp_layers and not present:
        notes.append(
            "the config names an MTP layer, but the file has no mtp.* tensors: none is used"
        )
        return dataclasses.replace(spec, mtp_layers=0)
    if present and not spec.mtp_layers:
        notes.append("the file has mtp.* tensors, but the config names no MTP layer: none is used")
    return spec


def check(spec: ModelSpec, tied: bool, stored: dict[str, Stored], where: str) -> dict[str, Stored]:
    """The tensors of the model in file order, the head last. ModelFileError for a missing tensor,
    one of the wrong shape, a vector that is not F32 or BF16, or a tensor that the model has no use
    for."""
    shapes = expected(spec)
    if not tied or HEAD in stored:
        shapes[HEAD] = (spec.vocab, spec.hidden)
    found: dict[str, Stored] = {}
    for name, (rows, cols) in shapes.items():
        item = stored.get(name)
        if item is None:
            fail(where, f"expected the tensor {name} [{rows}, {cols}], found none of that name.")
        if (item.rows, item.cols) != (rows, cols):
            fail(
                where,
                f"tensor {name}: expected the shape [{rows}, {cols}], found "
                f"[{item.rows}, {item.cols}].",
            )
        if (cols == 1 or is_conv(name)) and item.encoding not in (ENC_F32, ENC_BF16):
            fail(where, f"tensor {name}: expected F32, BF16 or F16, found a quantized tensor.")
        found[name] = item
    for name in stored:
        if name not in shapes and not name.startswith("mtp."):
            fail(where, f"found the tensor {quote(name)}, which this kind of model does not have.")
        if name not in shapes and spec.mtp_layers:
            fail(where, f"found the tensor {quote(name)}, which an MTP layer does not have.")
    return found
