"""Conversion speed against native packing of the same bytes alone, in one run.

    python -m bench.convert [--mib 400] [--rounds 5] [--dir FOLDER] [--save]

Native packing alone takes the same stripes from memory, decodes and encodes them on all cores and
keeps nothing; a conversion also reads the folder, takes checksums, writes, and syncs to the disk.
Both are measured in turn and the medians compared. `cpu_ratio` compares processor seconds in the
same way: it is what `ratio` would be with all cores free and busy.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import Report
from kslserve.ksl import layout, policy
from kslserve.ksl.convert import convert
from kslserve.ksl.hf_config import read_config
from kslserve.ksl.ksl1_write import plan_ksl1
from kslserve.ksl.open import open_source
from kslserve.ksl.policy import Planned
from kslserve.ksl.quantize import encode_piece, stripe_rows, worker_count

CASES = (("container", "fp6"), ("container", "nvfp4"), ("ksl1", "fp6"))


def make_folder(path: Path, mib: int) -> None:
    """A bf16 model of about that size: as many layers of the 4B's width as fit beside a vocabulary
    that is as small a share of it as that of the 27B."""
    config: dict[str, Any] = {
        "model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "vocab_size": 4096,
        "max_position_embeddings": 262144, "mtp_num_hidden_layers": 0,
        "tie_word_embeddings": False, "num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    sizes = []
    for layers in (1, 2):
        config["num_hidden_layers"] = layers
        shapes = layout.expected(read_config(config, "bench").spec)
        sizes.append(2 * sum(rows * cols for rows, cols in shapes.values()))
    config["num_hidden_layers"] = max(1, ((mib << 20) - sizes[0]) // (sizes[1] - sizes[0]))
    spec = read_config(config, "bench").spec
    shapes = layout.expected(spec) | {layout.HEAD: (spec.vocab, spec.hidden)}
    header, position = {}, 0
    for name, (rows, cols) in shapes.items():
        shape = [rows] if cols == 1 else [rows, 1, cols] if layout.is_conv(name) else [rows, cols]
        end = position + 2 * rows * cols
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(1)
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = position // 2
        while left:
            count = min(left, 8 << 20)
            values = random.standard_normal(count, dtype=np.float32) * np.float32(0.02)
            file.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
            left -= count
    os.sync()  # what is still on its way to the disk would be timed with the first conversion


def packing(folder: Path, items: tuple[Planned, ...]) -> tuple[Callable[[], None], int]:
    """What packs all stripes that need it from memory; and the weights in them."""
    source = open_source(str(folder))
    work, weights = [], 0
    for item in items:
        if item.encoding == source.stored[item.origin].encoding:
            continue
        weights += item.rows * item.cols
        step = stripe_rows(item.cols)
        for begin in range(0, item.rows, step):
            piece = source.rows(item.origin, begin, min(begin + step, item.rows))
            work.append((piece, item.encoding, begin))

    def run() -> None:
        with ThreadPoolExecutor(worker_count()) as pool:
            for _ in pool.map(lambda w: encode_piece(*w, source) and None, work):
                pass

    return run, weights


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """(seconds, processor seconds of all threads)"""
    started, used = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - started, time.process_time() - used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="where the files go; default: the system's")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    report = Report("convert")
    with tempfile.TemporaryDirectory(dir=args.dir) as base:
        folder = Path(base) / "model"
        make_folder(folder, args.mib)
        target = Path(base) / "out.ksl"
        for file_format, weights in CASES:
            source = open_source(str(folder))
            if file_format == "ksl1":
                items = plan_ksl1(source).tensors
            else:
                items = policy.plan(source, weights).tensors
            source.close()
            pack, count = packing(folder, items)

            def whole(file_format: str = file_format, weights: str = weights) -> None:
                convert(str(folder), str(target), file_format=file_format, weights=weights)

            alone, whole_s = [], []
            for _ in range(args.rounds):
                target.unlink(missing_ok=True)
                alone.append(timed(pack))
                whole_s.append(timed(whole))
            (native, native_cpu), (full, full_cpu) = (
                [sorted(column)[args.rounds // 2] for column in zip(*times, strict=True)]
                for times in (alone, whole_s)
            )
            report.add(
                f"{file_format}_{weights}",
                mweights_s=count / full / 1e6,
                native_mweights_s=count / native / 1e6,
                ratio=native / full,
                cpu_ratio=native_cpu / full_cpu,
                out_mib_s=target.stat().st_size / full / (1 << 20),
                workers=worker_count(),
            )
    report.write(args.save)


if __name__ == "__main__":
    main()
