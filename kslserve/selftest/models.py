"""Random models in memory, small but with every kind of layer.

`ragged` has sizes that are multiples of nothing: partial panels, scale blocks and vectors. `heads`
has the attention and delta-rule heads of the 27B, so the kernels that are made for them run.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kslserve.engine import codecs
from kslserve.engine.model import ModelSpec, TensorArg
from kslserve.ksl import layout

F32 = npt.NDArray[np.float32]

KINDS = ("linear", "full", "linear", "linear")
SHAPES = {
    "ragged": ModelSpec(
        vocab=203, hidden=80, intermediate=144, layer_kinds=KINDS, heads=6, kv_heads=2, head_dim=24,
        rotary_dims=8, lin_key_heads=2, lin_value_heads=6, lin_key_dim=16, lin_value_dim=40,
        conv_taps=4, mtp_layers=1, token_limit=199, rope_theta=1e4, norm_eps=1e-6,
        max_positions=4096,
    ),
    "heads": ModelSpec(
        vocab=1203, hidden=256, intermediate=512, layer_kinds=KINDS, heads=24, kv_heads=4,
        head_dim=256, rotary_dims=64, lin_key_heads=16, lin_value_heads=48, lin_key_dim=128,
        lin_value_dim=128, conv_taps=4, mtp_layers=1, token_limit=1199, rope_theta=1e7,
        norm_eps=1e-6, max_positions=4096,
    ),
}  # fmt: skip
ENCODINGS = {
    "bf16": codecs.ENC_BF16,
    "fp8": codecs.ENC_FP8,
    "fp6": codecs.ENC_E2M3,
    "nvfp4": codecs.ENC_NVFP4,
}


def random_tensors(spec: ModelSpec, encoding: str, seed: int) -> list[TensorArg]:
    """Every tensor of `spec`, drawn from `seed` in the magnitudes of a trained model: matrices in
    `encoding` (a key of ENCODINGS), the embedding in bf16, vectors and convolutions in float32."""
    shapes = layout.expected(spec)
    shapes[layout.HEAD] = (spec.vocab, spec.hidden)
    rng = np.random.default_rng(seed)
    return [_tensor(name, *shape, encoding, rng) for name, shape in shapes.items()]


def _tensor(name: str, rows: int, cols: int, encoding: str, rng: np.random.Generator) -> TensorArg:
    plain = cols == 1 or name.endswith("conv1d.weight")
    number = codecs.ENC_F32 if plain else ENCODINGS[encoding]
    if name == layout.EMBEDDING:
        number = codecs.ENC_BF16
    encoded = codecs.encode(number, _values(name, rows, cols, rng))
    return TensorArg(name, number, rows, cols, encoded.codes, encoded.scales, encoded.globals)


def _values(name: str, rows: int, cols: int, rng: np.random.Generator) -> F32:
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf == "A_log":
        values = np.log(0.5 + 8 * rng.random((rows, 1)))
    elif leaf == "dt_bias":  # steps of 0.001 to 0.1 after softplus
        values = np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(0.1), (rows, 1)))))
    elif cols == 1:  # gains: stored minus 1, but for the one of the delta rule
        mean = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
        values = mean + 0.2 * rng.standard_normal((rows, 1))
    elif name.endswith("conv1d.weight"):
        values = 0.5 * rng.standard_normal((rows, cols))
    else:
        gain = 0.4 if name == layout.EMBEDDING else 1 / np.sqrt(cols)
        values = gain * rng.standard_normal((rows, cols))
        values *= np.exp(0.3 * rng.standard_normal((rows, 1)))
    return values.astype(np.float32)
