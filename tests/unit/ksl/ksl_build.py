"""Tiny seeded model folders, and safetensors files with any header, for the tests of this
folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from kslserve.engine.model import RowReader, TensorArg
from kslserve.ksl import layout
from kslserve.ksl.hf_config import read_config
from kslserve.ksl.model import ModelFile

ITEM_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype, shape, data


def text_config(**changes: Any) -> dict[str, Any]:
    """A flat config of a four-layer model (linear, linear, linear, full) of hidden size 32."""
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1,
        "eos_token_id": 3,
    } | changes


def nested(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5",
        "text_config": config,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "vision_config": {"depth": 1},
    }


def bf16(values: np.ndarray) -> bytes:
    """Values cut to bf16."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """bf16 tensors under stored names, the head included when untied."""
    flat = config.get("text_config", config)
    family = read_config(config, "test")
    shapes = layout.expected(family.spec)
    if not family.tied:
        shapes[layout.HEAD] = (flat["vocab_size"], flat["hidden_size"])
    random = np.random.default_rng(seed)
    found: dict[str, Tensor] = {}
    for name, (rows, cols) in shapes.items():
        shape: tuple[int, ...] = (rows,) if cols == 1 else (rows, cols)
        if layout.is_conv(name):
            shape = (rows, 1, cols)
        if "text_config" in config and name.startswith("model."):
            name = "model.language_model." + name.removeprefix("model.")
        found[name] = ("BF16", shape, bf16(random.normal(size=rows * cols)))
    return found


def safetensors(
    items: dict[str, Tensor], metadata: dict[str, str] | None = None, pad: int = 0
) -> bytes:
    """A whole file; pad: spaces after the header, to shift the data."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata is not None else {}
    position = 0
    for name, (dtype, shape, data) in items.items():
        header[name] = {
            "dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]
        }  # fmt: skip
        position += len(data)
    return with_header(
        json.dumps(header).encode() + b" " * pad, b"".join(t[2] for t in items.values())
    )


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def folder(
    path: Path, config: dict[str, Any] | None = None, items: dict[str, Tensor] | None = None
) -> Path:
    """A model folder with one safetensors file and no tokenizer."""
    config = text_config() if config is None else config
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(
        safetensors(tensors(config) if items is None else items)
    )
    return path


def shard(path: Path) -> None:
    """Split a folder's model.safetensors in two shards with an index."""
    raw = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    weight_map: dict[str, str] = {}
    for number in (0, 1):
        name = f"part-{number}.safetensors"
        part: dict[str, Tensor] = {}
        for index, (key, item) in enumerate(header.items()):
            if index % 2 == number:
                begin, end = item["data_offsets"]
                data = raw[8 + size + begin : 8 + size + end]
                part[key] = (item["dtype"], tuple(item["shape"]), data)
                weight_map[key] = name
        (path / name).write_bytes(safetensors(part))
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "model.safetensors").unlink()


def tokenizer(size: int, ends: bool = True) -> bytes:
    """A tokenizer.json with `size` ids; the last two are the end tokens when `ends`."""
    plain = size - 2 if ends else size
    added = [
        {"id": plain + i, "content": text, "special": True}
        for i, text in enumerate(("<|endoftext|>", "<|im_end|>") if ends else ())
    ]
    vocab = {f"t{i}": i for i in range(plain)}
    return json.dumps({"added_tokens": added, "model": {"vocab": vocab, "merges": []}}).encode()


def loaded(model: ModelFile) -> list[TensorArg]:
    """The tensors of a model with their values in memory: data as uint8 [bytes]."""
    return [arg if arg.read is None else _whole(arg, arg.read) for arg in model.tensors]


def _whole(arg: TensorArg, read: RowReader) -> TensorArg:
    parts = zip(*read(0, arg.rows), strict=True)
    joined = [None if p[0] is None else np.concatenate(p) for p in parts]
    return TensorArg(arg.name, arg.encoding, arg.rows, arg.cols, *joined)
