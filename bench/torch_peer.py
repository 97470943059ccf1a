"""Prompts of transformers with flash-linear-attention, the peer of bench/prefill.py.

    python -m bench.torch_peer [--model synth:27b] [--lengths 2048,8192] [--reps 3]

Needs torch, transformers and a device that holds the model in bf16; `fla` speeds the delta rule up
by several times where it is installed, and whether it was is printed. Weights are random in the
shape of the model; the first prompt of every length compiles and is not counted. Prints one JSON
object: versions, and seconds of a prompt to its first token by length.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from bench.report import ROOT
from kslserve.engine.model import ModelSpec
from kslserve.ksl.open import open_source


def config_of(spec: ModelSpec) -> Any:
    """Their configuration of the same text tower."""
    from transformers import Qwen3_5TextConfig

    half = spec.rotary_dims // 2
    sections = [(half + 2) // 3, (half + 1) // 3, half // 3]  # time, height and width of an image
    found = Qwen3_5TextConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        layer_types=[f"{kind}_attention" for kind in spec.layer_kinds],
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        linear_num_key_heads=spec.lin_key_heads,
        linear_num_value_heads=spec.lin_value_heads,
        linear_key_head_dim=spec.lin_key_dim,
        linear_value_head_dim=spec.lin_value_dim,
        max_position_embeddings=spec.max_positions,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": spec.rope_theta,
            "partial_rotary_factor": spec.rotary_dims / spec.head_dim,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
    )
    found._attn_implementation = "sdpa"
    return found


def timed(spec: ModelSpec, lengths: list[int], reps: int) -> dict[int, float]:
    """Seconds of a prompt by its length, the median of `reps`."""
    import torch
    from transformers import Qwen3_5ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    with torch.device("cuda"):
        model = Qwen3_5ForCausalLM(config_of(spec)).eval().to(torch.bfloat16)
    found = {}
    for n in lengths:
        ids = torch.randint(0, spec.vocab, (1, n), device="cuda")
        seconds = []
        for _ in range(reps + 1):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            model(ids, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        found[n] = statistics.median(seconds[1:])
    return found


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measure(model: str, lengths: str) -> dict[str, Any]:
    """What this module prints, from a process of its own: torch gives no memory back. Empty where
    it fails, with the last line of what it said."""
    command = [sys.executable, "-m", "bench.torch_peer", "--model", model]
    command += ["--lengths", lengths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"no peer: {(done.stderr.strip().splitlines() or ['?'])[-1]}", flush=True)
        return {}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="synth:27b")
    parser.add_argument("--lengths", default="2048,8192")
    parser.add_argument("--reps", type=int, default=3)
    args = parser.parse_args()
    spec = open_source(args.model).spec
    seconds = timed(spec, [int(n) for n in args.lengths.split(",")], args.reps)
    fla = version("fla-core")
    print(
        json.dumps(
            {
                "torch": version("torch"),
                "transformers": version("transformers"),
                "fla": fla,
                "causal_conv1d": version("causal-conv1d"),
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
