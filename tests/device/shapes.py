"""Models for device tests: the tiny one, one whose sizes fit every KV format, one whose products
are divided like those of the 27B, and the head geometry of the 27B at a small width. Each is made
once a process, since that takes longer than what most tests do with it: what they get is shared, so
arrays are read-only."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from kslserve.engine.model import ModelSpec, TensorArg
from tests.tiny import F32, tiny_arrays, tiny_spec, tiny_tensors

SEED = secrets.randbits(32)  # of fresh inputs


@cache
def arrays_of(spec: ModelSpec, seed: int = 1, tied: bool = False) -> Mapping[str, F32]:
    """What tiny_arrays gives."""
    arrays = tiny_arrays(spec, seed, tied=tied)
    for array in arrays.values():
        array.setflags(write=False)
    return arrays


@cache
def tensors_of(spec: ModelSpec, policy: str, seed: int = 1, tied: bool = False) -> list[TensorArg]:
    """What tiny_tensors makes of them."""
    return tiny_tensors(spec, dict(arrays_of(spec, seed, tied)), policy)


def spec_named(name: str) -> ModelSpec:
    if name == "tiny":
        return tiny_spec()
    if name == "round":
        return replace(
            tiny_spec(),
            hidden=512,
            intermediate=768,
            vocab=1203,
            token_limit=1199,
            head_dim=64,
            rotary_dims=16,
            lin_key_dim=32,
            lin_value_dim=64,
        )
    if name == "sliced":  # four slices, of which few tokens join two
        return replace(spec_named("round"), hidden=1536, intermediate=2048)
    return replace(
        tiny_spec(),
        hidden=256,
        intermediate=512,
        vocab=1203,
        token_limit=1199,
        heads=24,
        kv_heads=4,
        head_dim=256,
        rotary_dims=64,
        lin_key_heads=16,
        lin_value_heads=48,
        lin_key_dim=128,
        lin_value_dim=128,
        rope_theta=1e7,
    )


def tap_names(spec: ModelSpec) -> list[str]:
    """Every tap of every layer and of both ends."""
    names = ["embed", "final_norm", "logits"]
    linear = (
        "gdn_qkv gdn_z gdn_b gdn_a gdn_conv_silu gdn_q gdn_k gdn_v gdn_g gdn_beta gdn_core "
        "gdn_normed"
    )
    full = "attn_q attn_gate attn_k attn_v attn_pregate attn_gated"
    every = "in_norm mixer_out mid post_norm mlp_gate mlp_up mlp_act mlp_out out"
    layers = [(f"layers.{i}", kind) for i, kind in enumerate(spec.layer_kinds)]
    if spec.mtp_layers:
        names += ["mtp_input", "mtp_hidden", "mtp_logits"]
        layers.append(("mtp.layers.0", "full"))
    for prefix, kind in layers:
        leaves = (full if kind == "full" else linear) + " " + every
        names += [f"{prefix}.{leaf}" for leaf in leaves.split()]
    return names
