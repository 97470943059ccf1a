"""config.json of the family, flat (`qwen3_5_text`) or nested (`qwen3_5` with text_config), as a
spec.

What the engine would compute differently is refused by name here, so that nothing runs with a wrong
architecture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kslserve.engine.model import ModelSpec
from kslserve.errors import ModelFileError
from kslserve.ksl.files import fail, quote

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
LAYER_TYPES = {"linear_attention": "linear", "full_attention": "full"}
LAYERS_MAX = 1024
FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class FamilyConfig:
    """spec: token_limit is the vocabulary, mtp_layers as the config says. tied: the head is the
    embedding. eos_ids: of the config, often not those of generation."""

    spec: ModelSpec
    tied: bool
    eos_ids: tuple[int, ...]


class _Fields:
    """Typed reads of one JSON object; a wrong or missing value is a ModelFileError with its
    name."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def count(self, key: str, high: int = 1 << 24, default: int | None = None, low: int = 1) -> int:
        value = self._get(key, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, f"a whole number from {low} to {high}", value)
        return int(value)

    def real(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A number in (low, high]."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not low < value <= high:
            self.refuse(key, f"a number above {low:g} and at most {high:g}", value)
        return float(value)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse a value that the engine would not follow; absent means the family's own."""
        value = self.values.get(key)
        if value is not None and value not in allowed:
            self.refuse(key, " or ".join(quote(a) for a in allowed), value)

    def table(self, key: str) -> _Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "an object", value)
        return _Fields(value, f"{self.where}: {key}")

    def refuse(self, key: str, expected: str, value: object) -> None:
        fail(self.where, f"expected {key} to be {expected}, found {quote(value)}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            fail(self.where, f"expected the key {key}, found none.")
        return value


def read_config(config: dict[str, Any], where: str) -> FamilyConfig:
    """Check a parsed config.json. ModelFileError names the key and what was found."""
    outer = _Fields(config, where)
    _check_family(outer)
    text = outer.table("text_config") or outer
    if text is not outer:
        _check_family(text)
    text.only("attn_output_gate", True)
    text.only("attention_bias", False)
    text.only("hidden_act", "silu")
    text.only("output_gate_type", "swish", "silu")
    text.only("mtp_use_dedicated_embeddings", False)
    hidden = text.count("hidden_size", 1 << 20)
    heads = text.count("num_attention_heads", 1 << 14)
    head_dim = text.count("head_dim", 1 << 14, default=hidden // heads or None)
    theta, rotary_dims = _rotary(text, head_dim)
    vocab = text.count("vocab_size")
    spec = ModelSpec(
        vocab=vocab,
        hidden=hidden,
        intermediate=text.count("intermediate_size"),
        layer_kinds=_layer_kinds(text),
        heads=heads,
        kv_heads=text.count("num_key_value_heads", 1 << 14),
        head_dim=head_dim,
        rotary_dims=rotary_dims,
        lin_key_heads=text.count("linear_num_key_heads", 1 << 14),
        lin_value_heads=text.count("linear_num_value_heads", 1 << 14),
        lin_key_dim=text.count("linear_key_head_dim", 1 << 14),
        lin_value_dim=text.count("linear_value_head_dim", 1 << 14),
        conv_taps=text.count("linear_conv_kernel_dim", 64, low=2),
        mtp_layers=text.count("mtp_num_hidden_layers", 1, default=0, low=0),
        token_limit=vocab,
        rope_theta=theta,
        norm_eps=text.real("rms_norm_eps", 0.0, 1.0, default=1e-6),
        max_positions=text.count("max_position_embeddings", 1 << 30),
    )
    for many, few in (("heads", "kv_heads"), ("lin_value_heads", "lin_key_heads")):
        if getattr(spec, many) % getattr(spec, few):
            fail(
                where,
                f"expected {many} to be a multiple of {few}, found {getattr(spec, many)} and "
                f"{getattr(spec, few)}.",
            )
    eos = text.values.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    return FamilyConfig(spec, _tied(outer, text), eos_ids(eos, vocab, where))


def _check_family(fields: _Fields) -> None:
    kind = fields.values.get("model_type")
    if fields.values.get("num_experts"):
        fail(fields.where, "this is a mixture-of-experts model; only dense models are supported.")
    if kind in MODEL_TYPES:
        return
    detail = ""
    if isinstance(kind, str) and "moe" in kind:
        detail = " (a mixture-of-experts model)"
    elif kind == "qwen3_next":
        detail = " (its projections are packed in another way)"
    fail(
        fields.where,
        f"the model_type {quote(kind)}{detail} is not supported; expected qwen3_5 or qwen3_5_text.",
    )


def _layer_kinds(text: _Fields) -> tuple[str, ...]:
    count = text.count("num_hidden_layers", LAYERS_MAX)
    types = text.values.get("layer_types")
    if types is None:
        interval = text.count("full_attention_interval", LAYERS_MAX, default=4)
        return tuple("full" if i % interval == interval - 1 else "linear" for i in range(count))
    if not isinstance(types, list) or len(types) != count:
        text.refuse("layer_types", f"a list of {count} names", types)
    for value in types:
        if not isinstance(value, str) or value not in LAYER_TYPES:
            text.refuse("layer_types", "linear_attention and full_attention only", value)
    return tuple(LAYER_TYPES[value] for value in types)


def _rotary(text: _Fields, head_dim: int) -> tuple[float, int]:
    """(theta, rotated dimensions of a head) from rope_parameters or the older flat keys."""
    rope = text.table("rope_parameters") or text
    scaling = rope if rope is not text else text.table("rope_scaling")
    if scaling is not None:
        scaling.only("rope_type", "default")
        scaling.only("type", "default", "mrope")
    theta = rope.real("rope_theta", 1.0, 1e15)
    factor_at = rope if rope.values.get("partial_rotary_factor") is not None else text
    factor = factor_at.real("partial_rotary_factor", 0.0, 1.0, default=0.25)
    dims = int(head_dim * factor)
    if dims < 2 or dims % 2:
        factor_at.refuse("partial_rotary_factor", f"an even part of {head_dim} dimensions", factor)
    return theta, dims


def _tied(outer: _Fields, text: _Fields) -> bool:
    for fields in (text, outer):
        value = fields.values.get("tie_word_embeddings")
        if value is not None:
            if not isinstance(value, bool):
                fields.refuse("tie_word_embeddings", "true or false", value)
            return bool(value)
    return False


def eos_ids(value: object, vocab: int, where: str) -> tuple[int, ...]:
    """eos_token_id of a config: one id, a list, or none."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for item in ids:
        if type(item) is not int or not 0 <= item < vocab:
            fail(where, f"expected eos_token_id to be ids below {vocab}, found {quote(item)}.")
    return tuple(dict.fromkeys(ids))


def check_quantization(config: dict[str, Any], where: str) -> None:
    """Refuse a checkpoint whose quantization is not block-FP8 (E4M3, 128 x 128)."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        fields = _Fields(holder, where).table("quantization_config")
        if fields is None:
            continue
        fields.only("quant_method", "fp8")
        if fields.values.get("quant_method") != "fp8":
            raise ModelFileError(f"{fields.where}: expected quant_method fp8, found none.")
        fields.only("fmt", "e4m3")
        fields.only("weight_block_size", [FP8_BLOCK, FP8_BLOCK])


def is_finite(value: object) -> bool:
    """Whether it is a JSON number with a value. An integer may be too large for a float."""
    return type(value) is int or (type(value) is float and math.isfinite(value))
