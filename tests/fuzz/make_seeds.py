"""Writes tests/fuzz/seeds anew: `python -m tests.fuzz.make_seeds`.

Seeds with a number at the end are inputs that once broke a reader; they stay as they are."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from kslserve.ksl.convert import convert
from tests.fuzz.driver import SEEDS
from tests.unit.ksl import ksl1_reference as one
from tests.unit.ksl import ksl_build

MODEL = one.Model(
    hidden=32, inner=32, vocab=16, heads=1, kv_heads=1, head_dim=32, key_heads=1, key_dim=16,
    value_heads=16, value_dim=2, layers=[1, 2],
)  # fmt: skip


def ksl1(flags: int, model: one.Model = MODEL) -> bytes:
    values = model.values()
    made = {
        name: one.quantize(values[name], flags)
        for name, kind, _, _ in model.tensors(mtp=False)
        if kind == "q"
    }
    return one.write(model, values, made, flags)


def items() -> dict[str, ksl_build.Tensor]:
    values = MODEL.values()
    found: dict[str, ksl_build.Tensor] = {}
    for name, _, rows, cols in MODEL.tensors(mtp=True):
        shape: tuple[int, ...] = (rows,) if cols == 1 else (rows, cols)
        if name.endswith("conv1d.weight"):
            shape = (rows, 1, cols)
        found[name] = ("BF16", shape, one.raw("n", values[name]))
    return found


def main() -> None:
    SEEDS.mkdir(exist_ok=True)
    texts = {
        "config.json": json.dumps(MODEL.config()).encode(),
        "tokenizer.json": ksl_build.tokenizer(14),
        "generation_config.json": b'{"temperature": 0.7, "top_k": 20, "eos_token_id": [1, 2]}',
        "chat_template.jinja": b"{{ messages }}",
    }
    found = {f"text-{name}": data for name, data in texts.items()}
    found["folder-model.safetensors"] = ksl_build.safetensors(items(), {"format": "pt"})
    found["index-model.safetensors.index.json"] = json.dumps(
        {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(items(), "model.safetensors")}
    ).encode()
    tied = one.Model(**{**vars(MODEL), "tied": True})
    found["ksl1-fp6.ksl"] = ksl1(one.PRODUCTION)
    found["ksl1-fp6-tied.ksl"] = ksl1(0x13D, tied)
    found["ksl1-fp8.ksl"] = ksl1(0x03D)
    found["ksl1-fp8-plain.ksl"] = ksl1(0x01D)
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "m"
        folder.mkdir()
        for name, data in texts.items():
            (folder / name).write_bytes(data)
        (folder / "model.safetensors").write_bytes(found["folder-model.safetensors"])
        for weights in ("fp6", "nvfp4"):
            target = Path(base) / f"{weights}.ksl"
            convert(str(folder), str(target), weights=weights)
            found[f"container-{weights}.ksl"] = target.read_bytes()
    for name, data in found.items():
        (SEEDS / name).write_bytes(data)


if __name__ == "__main__":
    main()
