"""`synth:SHAPE`: a model of real dimensions without data; the engine fills the tensors itself.

Weights are noise, so the output is too; speed and memory are those of the real model. Tokenizer and
template are the bundled model's unless others are given, and the ids above them are masked.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

from kslserve.engine.codecs import ENC_BF16
from kslserve.engine.model import FILL_CONSTANT, FILL_UNIFORM, Fill, TensorArg
from kslserve.ksl import layout
from kslserve.ksl.files import fail, quote
from kslserve.ksl.hf_config import read_config
from kslserve.ksl.model import GENERATION, TEMPLATE, TOKENIZER, Source

PREFIX = "synth:"

# hidden, MLP, layers, attention heads, KV heads, delta-rule value heads, tied head
SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "27b": (5120, 17408, 64, 24, 4, 48, False),
    "9b": (4096, 12288, 32, 16, 4, 32, False),
    "4b": (2560, 9216, 32, 16, 4, 32, True),
    "0.8b": (1024, 3584, 24, 8, 2, 16, True),
}
TEST_SHAPE = "test"  # four small layers, for tests that need a model of this kind
A_LOG, DT_BIAS = 0.0, -2.0  # a decay of about 0.9 a token


def open_synth(path: str, texts: Callable[[], Source]) -> Source:
    """The source behind `synth:SHAPE`. texts: opens the model that lends its text files.
    ModelFileError for an unknown shape."""
    shape = path.removeprefix(PREFIX)
    if shape not in SHAPES and shape != TEST_SHAPE:
        fail(quote(path), f"expected one of {', '.join(PREFIX + s for s in SHAPES)}.")
    config = _config(shape)
    family = read_config(config, path)
    shapes = layout.expected(family.spec)
    if not family.tied:
        shapes[layout.HEAD] = (family.spec.vocab, family.spec.hidden)
    stored = {name: layout.Stored(ENC_BF16, *size) for name, size in shapes.items()}

    def rows(name: str, begin: int, end: int) -> TensorArg:
        raise AssertionError("it has fills")

    lender = texts()
    try:
        files = {n: lender.files[n] for n in (TOKENIZER, TEMPLATE, GENERATION) if n in lender.files}
    finally:
        lender.close()
    return Source(
        name=path.replace(":", "-"),
        description=f"{path}, without data",
        where=path,
        spec=family.spec,
        tied=family.tied,
        stored=stored,
        rows=rows,
        fills={name: _fill(name, item.cols) for name, item in stored.items()},
        kind="synth",
        stored_bytes=dict.fromkeys(stored, 0),
        config=config,
        config_eos=(),
        files=files,
        notes=["the weights are noise: for measuring, not for use"],
    )


def _config(shape: str) -> dict[str, Any]:
    """The config.json that a model of this shape has."""
    base: dict[str, Any] = {
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
    }
    if shape == TEST_SHAPE:
        return base | {
            "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32,
            "vocab_size": 8192, "max_position_embeddings": 4096, "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        }  # fmt: skip
    hidden, inner, layers, heads, kv_heads, value_heads, tied = SHAPES[shape]
    return base | {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "vocab_size": 248320, "max_position_embeddings": 262144, "tie_word_embeddings": tied,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip


def _fill(name: str, cols: int) -> Fill:
    """Values that keep activations near 1: matrices of unit gain, neutral norms, a slow decay."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("linear_attn.norm.weight"):
        return Fill(FILL_CONSTANT, scale=1.0)  # the one plain gain; the others are stored minus 1
    if leaf == "A_log":
        return Fill(FILL_CONSTANT, scale=A_LOG)
    if leaf == "dt_bias":
        return Fill(FILL_CONSTANT, scale=DT_BIAS)
    if cols == 1:
        return Fill(FILL_CONSTANT, scale=0.0)
    width = 1 if name == layout.EMBEDDING else cols
    return Fill(FILL_UNIFORM, zlib.crc32(name.encode()), math.sqrt(3 / width))
