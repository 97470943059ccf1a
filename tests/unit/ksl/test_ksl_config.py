from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kslserve.errors import ModelFileError
from kslserve.ksl import layout
from kslserve.ksl.hf_config import check_quantization, read_config
from tests.unit.ksl.ksl_build import nested, text_config

DATA = Path(__file__).resolve().parents[2] / "data"


def without(*keys: str, **changes: Any) -> dict[str, Any]:
    config = text_config(**changes)
    for key in keys:
        del config[key]
    return config


def test_the_published_27b() -> None:
    config = json.loads((DATA / "qwen3_8_27b_config.json").read_text())
    family = read_config(config, "c")
    spec = family.spec
    assert (spec.layers, spec.hidden, spec.heads, spec.rotary_dims) == (64, 5120, 24, 64)
    assert spec.layer_kinds.count("full") == 16
    assert spec.layer_kinds[3] == "full"
    assert (spec.rope_theta, spec.max_positions, family.tied) == (1e7, 262144, False)
    assert family.eos_ids == (248044,)
    shapes = layout.expected(spec)
    # 851 trunk tensors with the head, and 15 of the MTP layer
    assert len(shapes) + 1 == 851 + 15
    weights = sum(rows * cols for rows, cols in shapes.values()) + spec.vocab * spec.hidden
    assert weights == 27_320_697_856


def test_flat_and_nested_agree() -> None:
    assert read_config(text_config(), "c") == read_config(nested(text_config()), "c")


def test_layer_kinds_from_the_interval_or_the_list() -> None:
    assert read_config(text_config(), "c").spec.layer_kinds == ("linear",) * 3 + ("full",)
    three = read_config(text_config(full_attention_interval=2), "c").spec.layer_kinds
    assert three == ("linear", "full", "linear", "full")
    kinds = ["full_attention", "linear_attention", "linear_attention", "linear_attention"]
    assert read_config(text_config(layer_types=kinds), "c").spec.layer_kinds[0] == "full"


def test_rotary_keys_old_and_new() -> None:
    new = read_config(text_config(), "c").spec
    old = read_config(
        without("rope_parameters", rope_theta=10000, partial_rotary_factor=0.25), "c"
    ).spec
    assert (new.rope_theta, new.rotary_dims) == (old.rope_theta, old.rotary_dims) == (10000.0, 4)
    mixed = text_config(rope_parameters={"rope_theta": 5e5}, partial_rotary_factor=0.5)
    assert read_config(mixed, "c").spec.rotary_dims == 8


def test_defaults() -> None:
    bare = without("tie_word_embeddings", "mtp_num_hidden_layers", "eos_token_id", "head_dim")
    family = read_config(bare, "c")
    assert (family.tied, family.eos_ids) == (False, ())
    assert (family.spec.mtp_layers, family.spec.head_dim) == (0, 16)
    outer = nested(without("tie_word_embeddings", "eos_token_id") | {"tie_word_embeddings": None})
    outer |= {"tie_word_embeddings": True, "eos_token_id": [5, 5, 6]}
    assert read_config(outer, "c").tied
    assert read_config(outer, "c").eos_ids == (5, 6)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "model_type None is not supported"),
        (text_config(model_type="llama"), "'llama' is not supported; expected qwen3_5"),
        (text_config(model_type="qwen3_5_moe"), "mixture-of-experts"),
        (text_config(model_type="qwen3_next"), "packed in another way"),
        (text_config(num_experts=8), "mixture-of-experts"),
        (nested(text_config(num_experts=8)), "mixture-of-experts"),
        ({"model_type": "qwen3_5", "text_config": []}, "expected text_config to be an object"),
        (without("hidden_size"), "expected the key hidden_size, found none"),
        (text_config(hidden_size="32"), "expected hidden_size to be a whole number"),
        (text_config(hidden_size=True), "hidden_size"),
        (text_config(hidden_size=32.0), "hidden_size"),
        (text_config(vocab_size=0), "vocab_size"),
        (text_config(num_hidden_layers=10**9), "num_hidden_layers"),
        (text_config(layer_types=["full_attention"]), "a list of 4 names"),
        (text_config(layer_types=["full_attention"] * 3 + ["mamba"]), "'mamba'"),
        (text_config(layer_types=["full_attention"] * 3 + [[]]), "layer_types"),
        (text_config(num_key_value_heads=3), "heads to be a multiple of kv_heads"),
        (text_config(linear_num_key_heads=3), "lin_value_heads to be a multiple"),
        (text_config(attention_bias=True), "attention_bias"),
        (text_config(attn_output_gate=False), "attn_output_gate"),
        (text_config(hidden_act="gelu"), "hidden_act to be 'silu'"),
        (text_config(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings"),
        (text_config(mtp_num_hidden_layers=2), "mtp_num_hidden_layers"),
        (text_config(rope_parameters={"rope_theta": "x"}), "rope_parameters: expected rope_theta"),
        (text_config(rope_parameters={}), "expected the key rope_theta"),
        (text_config(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"}), "'yarn'"),
        (text_config(rope_parameters={"rope_theta": float("nan")}), "rope_theta"),
        (text_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 2}), "partial"),
        (text_config(head_dim=20), "an even part of 20 dimensions"),
        (text_config(rms_norm_eps=0), "rms_norm_eps"),
        (text_config(tie_word_embeddings="yes"), "tie_word_embeddings"),
        (text_config(eos_token_id=64), "ids below 64, found 64"),
        (text_config(eos_token_id=["x"]), "eos_token_id"),
    ],
)
def test_what_is_refused_is_named(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_config(config, "c")
    assert text in caught.value.message
    assert caught.value.message.startswith("c")
    assert caught.value.message.endswith(".")


@settings(max_examples=150, deadline=None)
@given(
    key=st.sampled_from(sorted(text_config())),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=6,
    ),
)
def test_any_value_is_read_or_refused(key: str, value: object) -> None:
    try:
        spec = read_config(text_config(**{key: value}), "c").spec
    except ModelFileError as error:
        error.message.encode("ascii")
    else:
        assert spec.hidden > 0
        assert len(spec.layer_kinds) > 0


def test_quantization_configs() -> None:
    good = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    check_quantization({}, "c")
    check_quantization({"quantization_config": good}, "c")
    for change in ({"quant_method": "awq"}, {"quant_method": None}, {"fmt": "e5m2"},
                   {"weight_block_size": [64, 64]}):  # fmt: skip
        for config in (
            {"quantization_config": good | change},
            {"text_config": {"quantization_config": good | change}},
        ):
            with pytest.raises(ModelFileError, match="quantization_config: expected"):
                check_quantization(config, "c")
