"""Golden checkpoints as engine arguments, read by a few lines of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kslserve.engine import codecs
from kslserve.engine.model import ModelSpec, TensorArg

FOLDER = Path(__file__).parents[1] / "data/golden"
NAMES = ("g1-tied", "g2-untied", "g1-tied-fp8")


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name / "golden.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


def golden_model(name: str) -> tuple[ModelSpec, list[TensorArg]]:
    """Spec and tensors, bf16, float32 and block FP8 as stored."""
    config = json.loads((FOLDER / name / "config.json").read_text())["text_config"]
    rope = config["rope_parameters"]
    spec = ModelSpec(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layer_kinds=tuple(kind.split("_")[0] for kind in config["layer_types"]),
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rotary_dims=int(config["head_dim"] * rope["partial_rotary_factor"]),
        lin_key_heads=config["linear_num_key_heads"],
        lin_value_heads=config["linear_num_value_heads"],
        lin_key_dim=config["linear_key_head_dim"],
        lin_value_dim=config["linear_value_head_dim"],
        conv_taps=config["linear_conv_kernel_dim"],
        mtp_layers=config["mtp_num_hidden_layers"],
        token_limit=config["vocab_size"],
        rope_theta=rope["rope_theta"],
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
    )
    stored = {
        key: entry
        for shard in sorted((FOLDER / name).glob("*.safetensors"))
        for key, entry in _read(shard).items()
    }
    tensors = []
    for key, (dtype, shape, data) in stored.items():
        if key.startswith("model.visual") or key.endswith("_scale_inv"):
            continue
        scales = None
        if dtype == "F8_E4M3":
            _, _, raw = stored[key + "_scale_inv"]
            scales = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        tensors.append(
            TensorArg(
                name=key.replace("language_model.", ""),
                encoding={
                    "F32": codecs.ENC_F32,
                    "BF16": codecs.ENC_BF16,
                    "F8_E4M3": codecs.ENC_FP8,
                }[dtype],
                rows=shape[0],
                cols=int(np.prod(shape[1:])),
                data=data,
                scales=scales,
            )
        )
    return spec, tensors


def _read(path: Path) -> dict[str, tuple[str, list[int], Any]]:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        key: (
            entry["dtype"],
            entry["shape"],
            raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
        )
        for key, entry in header.items()
    }
