"""A seeded small model in memory: every layer kind, in any encoding.

    spec = tiny_spec()
    arrays = tiny_arrays(spec, seed=1)
    tensors = tiny_tensors(spec, arrays, "mixed")     # for NativeEngine.open
    exact = tiny_values(spec, arrays, "mixed")        # what those tensors decode to

The dimensions avoid multiples of everything: partial panels, scale blocks, scan blocks and vectors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kslserve.engine import codecs
from kslserve.engine.model import ModelSpec, TensorArg

F32 = npt.NDArray[np.float32]

POLICIES = ("f32", "bf16", "fp8", "e2m3", "nvfp4", "mixed")
_ENCODINGS = {
    "f32": codecs.ENC_F32,
    "bf16": codecs.ENC_BF16,
    "fp8": codecs.ENC_FP8,
    "e2m3": codecs.ENC_E2M3,
    "nvfp4": codecs.ENC_NVFP4,
}


def tiny_spec(*, mtp: bool = True) -> ModelSpec:
    """Four layers (linear, full, linear, linear): three query heads per KV head, three value heads
    per key head, value heads wider than one scan block."""
    return ModelSpec(
        vocab=203,
        hidden=80,
        intermediate=144,
        layer_kinds=("linear", "full", "linear", "linear"),
        heads=6,
        kv_heads=2,
        head_dim=24,
        rotary_dims=8,
        lin_key_heads=2,
        lin_value_heads=6,
        lin_key_dim=16,
        lin_value_dim=40,
        conv_taps=4,
        mtp_layers=int(mtp),
        token_limit=199,
        rope_theta=1e4,
        norm_eps=1e-6,
        max_positions=4096,
    )


def wide_spec() -> ModelSpec:
    """The same with heads of 64 dimensions, which every KV format takes."""
    return replace(tiny_spec(), head_dim=64, rotary_dims=16)


def tiny_arrays(spec: ModelSpec, seed: int = 1, *, tied: bool = False) -> dict[str, F32]:
    """Float32 arrays by canonical name, in the scale of a trained model. Vectors are [n], conv1d is
    [channels, taps]. tied: no lm_head.weight."""
    rng = np.random.default_rng(seed)
    h, inner = spec.hidden, spec.intermediate
    arrays: dict[str, F32] = {}

    def matrix(name: str, rows: int, cols: int, gain: float = 1.0) -> None:
        values = rng.standard_normal((rows, cols)) * (gain / np.sqrt(cols))
        arrays[name] = (values * np.exp(0.3 * rng.standard_normal((rows, 1)))).astype(np.float32)

    def vector(name: str, n: int, mean: float = 0.0) -> None:
        arrays[name] = (mean + 0.2 * rng.standard_normal(n)).astype(np.float32)

    def layer(prefix: str, kind: str) -> None:
        vector(prefix + "input_layernorm.weight", h)
        vector(prefix + "post_attention_layernorm.weight", h)
        if kind == "full":
            width, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
            matrix(prefix + "self_attn.q_proj.weight", 2 * width, h)
            matrix(prefix + "self_attn.k_proj.weight", kv, h)
            matrix(prefix + "self_attn.v_proj.weight", kv, h)
            matrix(prefix + "self_attn.o_proj.weight", h, width, 0.7)
            vector(prefix + "self_attn.q_norm.weight", spec.head_dim, 0.4)
            vector(prefix + "self_attn.k_norm.weight", spec.head_dim, 0.3)
        else:
            heads = spec.lin_value_heads
            width = heads * spec.lin_value_dim
            channels = 2 * spec.lin_key_heads * spec.lin_key_dim + width
            linear = prefix + "linear_attn."
            matrix(linear + "in_proj_qkv.weight", channels, h)
            matrix(linear + "in_proj_z.weight", width, h)
            matrix(linear + "in_proj_b.weight", heads, h, 1.2)
            matrix(linear + "in_proj_a.weight", heads, h)
            arrays[linear + "conv1d.weight"] = np.float32(0.5) * rng.standard_normal(
                (channels, spec.conv_taps)
            ).astype(np.float32)
            arrays[linear + "A_log"] = np.log(0.5 + 8 * rng.random(heads)).astype(np.float32)
            step = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), heads))
            arrays[linear + "dt_bias"] = np.log(np.expm1(step)).astype(np.float32)
            vector(linear + "norm.weight", spec.lin_value_dim, 1.0)
            matrix(linear + "out_proj.weight", h, width, 0.7)
        matrix(prefix + "mlp.gate_proj.weight", inner, h)
        matrix(prefix + "mlp.up_proj.weight", inner, h)
        matrix(prefix + "mlp.down_proj.weight", h, inner, 0.7)

    arrays["model.embed_tokens.weight"] = (0.4 * rng.standard_normal((spec.vocab, h))).astype(
        np.float32
    )
    for i, kind in enumerate(spec.layer_kinds):
        layer(f"model.layers.{i}.", kind)
    vector("model.norm.weight", h)
    if not tied:
        matrix("lm_head.weight", spec.vocab, h, 3.0)
    if spec.mtp_layers:
        matrix("mtp.fc.weight", h, 2 * h)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            vector(f"mtp.{name}.weight", h)
        layer("mtp.layers.0.", "full")
    return arrays


def _encoding(name: str, array: F32, policy: str, order: int) -> int:
    if array.ndim == 1 or name.endswith("conv1d.weight"):
        return codecs.ENC_F32 if order % 2 else codecs.ENC_BF16
    if name == "model.embed_tokens.weight":
        return codecs.ENC_F32 if policy == "f32" else codecs.ENC_BF16
    if policy == "mixed":
        return tuple(_ENCODINGS.values())[order % len(_ENCODINGS)]
    return _ENCODINGS[policy]


def tiny_tensors(spec: ModelSpec, arrays: dict[str, F32], policy: str = "f32") -> list[TensorArg]:
    """The arrays encoded: matrices by the policy (`mixed` cycles through all encodings), vectors in
    float32 and bf16 by turns."""
    tensors = []
    for order, (name, array) in enumerate(arrays.items()):
        matrix = array if array.ndim == 2 else array[:, None]
        encoding = _encoding(name, array, policy, order)
        encoded = codecs.encode(encoding, matrix)
        tensors.append(
            TensorArg(
                name=name,
                encoding=encoding,
                rows=matrix.shape[0],
                cols=matrix.shape[1],
                data=encoded.codes,
                scales=encoded.scales,
                globals_=encoded.globals,
            )
        )
    return tensors


def tiny_values(spec: ModelSpec, arrays: dict[str, F32], policy: str = "f32") -> dict[str, F32]:
    """What `tiny_tensors` holds, decoded to float32, in the shapes of `arrays`."""
    return {
        t.name: codecs.decode(t.encoding, t.data, t.scales, t.globals_, t.rows, t.cols).reshape(
            arrays[t.name].shape
        )
        for t in tiny_tensors(spec, arrays, policy)
    }
