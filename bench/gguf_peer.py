"""A GGUF file of random weights in the shape of a model, for llama.cpp beside bench/cpu.py.

    python -m bench.gguf_peer [--shape synth:0.8b] [--type q4_0] FILE

Needs the `gguf` package. Every matrix, the embedding included, has the one encoding; the head is
tied to the embedding. The vocabulary is of made-up pieces: prompts are to be given as token ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kslserve.engine.model import ModelSpec
from kslserve.ksl.layout import EMBEDDING, expected, is_conv
from kslserve.ksl.open import open_source

ARCHITECTURE = "qwen35"
FULL_INTERVAL = 4  # every fourth layer is full attention
TYPES = {"q4_0": (32, 18), "q6_k": (256, 210), "q8_0": (32, 34)}  # weights and bytes of a block
SCALE_AT = {"q4_0": 0, "q6_k": 208, "q8_0": 0}  # of the block's half
SCALE = 0.002

LEAVES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def their_name(name: str) -> str:
    if name == EMBEDDING:
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, leaf = name.split(".", 3)
    return f"blk.{layer}.{LEAVES[leaf]}"


def tensors(spec: ModelSpec, encoding: str) -> Iterator[tuple[str, npt.NDArray[Any], bool]]:
    """Name, data and whether it has the encoding: then uint8 [rows, bytes of a row], otherwise
    float32."""
    rng = np.random.default_rng(1)
    weights, size = TYPES[encoding]
    at = SCALE_AT[encoding]
    for name, (rows, cols) in expected(spec).items():
        if name.startswith("mtp."):
            continue
        if cols == 1 or is_conv(name):
            value = -1.0 if name.endswith("A_log") else 0.5  # theirs holds -exp(A_log)
            shape = (rows, cols) if cols > 1 else (rows,)
            yield their_name(name), np.full(shape, value, np.float32), False
            continue
        blocks = rng.integers(0, 256, (rows * cols // weights, size), np.uint8)
        blocks[:, at : at + 2] = np.array([SCALE], np.float16).view(np.uint8)
        yield their_name(name), blocks.reshape(rows, -1), True


def describe(writer: Any, spec: ModelSpec) -> None:
    writer.add_block_count(spec.layers)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(spec.rotary_dims)
    third = spec.rotary_dims // 6
    writer.add_rope_dimension_sections([spec.rotary_dims // 2 - 2 * third, third, third, 0])
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_full_attention_interval(FULL_INTERVAL)
    writer.add_ssm_conv_kernel(spec.conv_taps)
    writer.add_ssm_state_size(spec.lin_key_dim)
    writer.add_ssm_group_count(spec.lin_key_heads)
    writer.add_ssm_time_step_rank(spec.lin_value_heads)
    writer.add_ssm_inner_size(spec.lin_value_heads * spec.lin_value_dim)
    # One piece for each byte, so that any text is some tokens.
    readable = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256))]
    bytes_as = readable + [chr(256 + i) for i in range(256 - len(readable))]
    pieces = bytes_as + [f"piece{i}" for i in range(len(bytes_as), spec.vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(pieces)
    writer.add_token_types([1] * spec.vocab)
    writer.add_token_merges(["p i"])
    writer.add_eos_token_id(spec.vocab - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--shape", default="synth:0.8b")
    parser.add_argument("--type", default="q4_0", choices=TYPES)
    args = parser.parse_args()
    try:
        import gguf
    except ImportError:
        raise SystemExit("writing a GGUF file needs the gguf package") from None
    source = open_source(args.shape)
    spec, tied = source.spec, source.tied
    source.close()
    kinds = tuple("full" if i % FULL_INTERVAL == 3 else "linear" for i in range(spec.layers))
    if not tied or spec.layer_kinds != kinds:
        raise SystemExit(f"{args.shape} has a head of its own, or layers in another order")
    writer = gguf.GGUFWriter(args.file, ARCHITECTURE)
    describe(writer, spec)
    for name, data, encoded in tensors(spec, args.type):
        kind = gguf.GGMLQuantizationType[args.type.upper()] if encoded else None
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
