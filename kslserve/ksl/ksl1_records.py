"""The tensors of a KSL1 file in their order, and their bytes: both follow from its header."""

from __future__ import annotations

from dataclasses import dataclass

from kslserve.engine.codecs import SCALE_BLOCK
from kslserve.engine.model import ModelSpec
from kslserve.ksl import layout
from kslserve.ksl.files import fail
from kslserve.ksl.ksl1_header import FLAG_BLOCK_SCALED, FLAG_E2M3, TILE_COLS, TILE_ROWS


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor of the file. kind: `nq` (bf16), `f32`, or `q` (a quantized matrix)."""

    name: str
    kind: str
    rows: int
    cols: int

    def size(self, flags: int, scale_cols: int | None = None) -> int:
        """Bytes in the file. scale_cols: width of the scale grid, by default one per 128."""
        if self.kind != "q":
            return self.rows * self.cols * (2 if self.kind == "nq" else 4)
        return self.head_bytes(flags, scale_cols) + self.payload_bytes(flags)

    def head_bytes(self, flags: int, scale_cols: int | None = None) -> int:
        """Bytes of a quantized record before its payload."""
        if not flags & FLAG_BLOCK_SCALED:
            return 4
        return 8 + 4 * self.scale_rows * (scale_cols or -(-self.cols // SCALE_BLOCK))

    def payload_bytes(self, flags: int) -> int:
        return self.rows * self.cols * (6 if flags & FLAG_E2M3 else 8) // 8

    @property
    def scale_rows(self) -> int:
        return -(-self.rows // SCALE_BLOCK)


_LINEAR = (
    "A_log", "dt_bias", "norm.weight", "conv1d.weight", "in_proj_a.weight", "in_proj_b.weight",
    "in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight",
)  # fmt: skip
_FULL = ("q_norm.weight", "k_norm.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight",
         "o_proj.weight")  # fmt: skip
_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_F32 = ("linear_attn.A_log", "linear_attn.norm.weight")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def records(spec: ModelSpec, tied: bool, mtp: bool) -> list[Record]:
    """Every tensor in file order, under its canonical name."""
    shapes = layout.expected(spec)
    shapes[layout.HEAD] = (spec.vocab, spec.hidden)
    names = [layout.EMBEDDING, "model.norm.weight"]
    if not tied:
        names.append(layout.HEAD)
    for index, kind in enumerate(spec.layer_kinds):
        prefix = f"model.layers.{index}."
        mixer = "self_attn." if kind == "full" else "linear_attn."
        names += [prefix + name for name in _NORMS]
        names += [f"{prefix}mlp.{name}" for name in _MLP]
        names += [prefix + mixer + name for name in (_FULL if kind == "full" else _LINEAR)]
    if mtp:
        names += ["mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"]
        names += ["mtp.fc.weight", *(f"mtp.layers.0.{name}" for name in _NORMS)]
        names += [f"mtp.layers.0.self_attn.{name}" for name in _FULL]
        names += [f"mtp.layers.0.mlp.{name}" for name in _MLP]
        names.append("mtp.norm.weight")
    return [Record(name, _kind(name, shapes[name][1]), *shapes[name]) for name in names]


def _kind(name: str, cols: int) -> str:
    if name.startswith("mtp.") or name == layout.EMBEDDING or layout.is_conv(name):
        return "nq"
    if name.endswith(_F32):
        return "f32"
    return "nq" if cols == 1 else "q"


def check_tiles(record: Record, where: str) -> None:
    """Refuse, by name, a quantized matrix that does not consist of whole tiles."""
    if record.kind == "q" and (record.rows % TILE_ROWS or record.cols % TILE_COLS):
        fail(
            where,
            f"tensor {record.name} [{record.rows}, {record.cols}]: expected rows in multiples of "
            f"{TILE_ROWS} and columns in multiples of {TILE_COLS}, which KSL1 needs.",
        )
