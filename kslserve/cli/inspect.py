"""`python -m kslserve inspect MODEL`: what a model file holds, whether it is whole, and whether it
would fit.

Exit status 0; 1 when the payload has not the size that the header promises (sparse files apart) or
a digest does not match; 2 for what is no model file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from kslserve.engine.budget import KV_FORMATS, KV_RING_TOKENS
from kslserve.errors import UsageError

EXIT_MISMATCH = 1
WIDTH = 30  # of the names
_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Describe a model file, folder or `synth:SHAPE`."
    parser.add_argument("model", metavar="MODEL", help="file, folder, `synth:SHAPE` or `ksl-nano`")
    parser.add_argument("--model-dir", default="", metavar="DIR", help="folder with the texts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verify", action="store_true", help="recompute all digests")
    plan = parser.add_argument_group("memory plan")
    plan.add_argument("--plan", action="store_true", help="print the memory plan of a device")
    plan.add_argument("--vram", metavar="SIZE", help="memory of the device, such as 32GiB")
    plan.add_argument("--context", type=_count, metavar="N", help="tokens (default: the model's)")
    plan.add_argument("--kv", choices=KV_FORMATS, default="q4", help="KV format (default: q4)")
    plan.add_argument(
        "--kv-ring", type=_ring, default=KV_RING_TOKENS, metavar="N",
        help="with int8ring_int4: last positions in int8, a multiple of 64",
    )  # fmt: skip
    plan.add_argument("--max-seqs", type=_count, default=2, metavar="N", help="sequences at once")
    plan.add_argument(
        "--checkpoints", type=_count_or_none, default=4, metavar="N", help="prefix checkpoints held"
    )
    plan.add_argument(
        "--wave-columns", type=_count, default=2048, metavar="N", help="prompt columns of a wave"
    )
    plan.add_argument(
        "--weights",
        choices=("auto", "fp6", "nvfp4", "nvfp4-mlp", "bf16"),
        default="auto",
        help="weight encoding, as for serve",
    )
    plan.add_argument(
        "--head", choices=("auto", "fp6", "nvfp4", "bf16"), default="auto", help="of the head"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; the exit status. Raises ModelFileError or UsageError."""
    from kslserve.ksl import report

    found = report.describe(args.model, args.model_dir)
    status = 0
    if found["payload_match"] is False and not found.get("sparse"):
        status = EXIT_MISMATCH
    if args.verify and status == 0:
        found["verify"] = _verify(args.model)
        if found["verify"]["wrong"]:
            status = EXIT_MISMATCH
    if args.plan:
        found["plan"] = _plan(args)
    elif args.vram is not None:
        raise UsageError("--vram is for --plan.")
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(_lines(found)))
    return status


def _verify(model: str) -> dict[str, Any]:
    from kslserve.cli.progress import Bar
    from kslserve.ksl import report

    bar = Bar(sys.stderr) if sys.stderr.isatty() else None
    try:
        return report.verify(model, bar.advance if bar else lambda done, total: None)
    finally:
        if bar:
            bar.clear()


def _plan(args: argparse.Namespace) -> dict[str, Any]:
    from kslserve.engine.codecs import encoded_bytes
    from kslserve.ksl import policy
    from kslserve.ksl.report import open_for_report
    from kslserve.startup.memory import MemoryWish, plan_memory

    if args.vram is None:
        raise UsageError("--plan needs the memory of the device: --vram SIZE, such as 32GiB.")
    source = open_for_report(args.model, args.model_dir)
    try:
        spec = source.spec
        plan = policy.plan(source, args.weights, args.head)
    finally:
        source.close()
    weights = encoded_bytes(plan.tensors)
    wish = MemoryWish(
        memory_bytes=parse_size("--vram", args.vram),
        context=args.context or spec.max_positions,
        kv=args.kv,
        max_seqs=args.max_seqs,
        checkpoints=args.checkpoints,
        wave_columns=args.wave_columns,
        kv_ring=args.kv_ring,
    )
    made = dataclasses.asdict(plan_memory(spec, weights, wish))
    made["weights_label"], made["head_label"] = plan.weights, plan.head
    made["model_context"] = spec.max_positions
    return made


def parse_size(label: str, text: str) -> int:
    """Bytes of a text such as 32GiB or 24.5GiB. UsageError."""
    unit = text[-3:] if text[-3:] in _UNITS else ""
    try:
        value = float(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1 << 60:
        raise UsageError(f"{label} is a size such as 32GiB or 800MiB, not {text!r}.")
    return int(value)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1 << 28:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _ring(text: str) -> int:
    value = _count(text)
    if value % 64:
        raise argparse.ArgumentTypeError(f"must be a multiple of 64, not {value}")
    return value


def _count_or_none(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _lines(found: dict[str, Any]) -> list[str]:
    """The report for people."""
    kind = found["kind"]
    lines = [f"{'file' if kind != 'synth' else 'shapes':{WIDTH}}{found['path']} ({kind})"]

    def add(name: str, value: object) -> None:
        lines.append(f"{name:{WIDTH}}{value}")

    def table(values: dict[str, Any]) -> str:
        return ", ".join(f"{key} {value}" for key, value in values.items())

    for name, value in found.get("header", {}).items():
        if name != "layer_types":
            add(name, f"{value:g}" if isinstance(value, float) else value)
    if "header" not in found:
        for name, value in _scalars(found["config"]):
            add(name, value)
    for name in ("format", "version", "weights", "head", "flags"):
        if found.get(name) is not None:
            add(name, found[name])
    add("layer_type_counts", table(found["layer_type_counts"]))
    add("tensor_kind_counts", table(found["tensor_kind_counts"]))
    add("parameters", f"{found['parameters']:,}")
    if found["tensor_bytes"]:
        for name, size in found["component_bytes"].items():
            add(f"bytes {name}", f"{size:,}")
        add("tensor_bytes", f"{found['tensor_bytes']:,}")
        add("bits_per_weight", found["bits_per_weight"])
    if found["expected_payload_bytes"] is not None:
        add("expected_payload", f"{found['expected_payload_bytes']:,}")
        add("actual_payload", f"{found['actual_payload_bytes']:,}")
        add("payload_match", _yes(found["payload_match"]))
    add("block_scaled_e2m3", _yes(found["block_scaled_e2m3"]))
    add("has_mtp_section", _yes(found["has_mtp_section"]))
    add("text_files", ", ".join(found["text_files"]) or "none")
    if "verify" in found:
        wrong = found["verify"]["wrong"]
        add("verify", f"{len(wrong)} wrong: {', '.join(wrong[:5])}" if wrong else "all match")
        if "sha256" in found["verify"]:
            add("sha256", found["verify"]["sha256"])
    lines += [f"{'note':{WIDTH}}{note}" for note in found["notes"]]
    if "plan" in found:
        lines += ["", *_plan_lines(found["plan"])]
    return lines


def _plan_lines(plan: dict[str, Any]) -> list[str]:
    wish = plan["wish"]
    rows = [
        (f"weights ({plan['weights_label']}, head {plan['head_label']})", plan["weights"]),
        (f"widest workspace ({wish['wave_columns']} columns)", plan["workspace"]),
        (f"KV, {wish['max_seqs']} x {wish['context']} tokens in {wish['kv']}", plan["kv"]),
        (f"slabs, {wish['max_seqs']} x {plan['slab']:,}", plan["slabs"]),
        (f"checkpoints, {wish['checkpoints']}", plan["checkpoints"]),
        ("slots and block tables", plan["slots"]),
        ("total", plan["total"]),
        ("device", wish["memory_bytes"]),
        ("headroom", plan["headroom"]),
    ]
    lines = [f"{name:44}{size:>20,}  {size / (1 << 30):>8.2f} GiB" for name, size in rows]
    lines.append(f"KV takes {plan['kv_token']:,} bytes per token.")
    lines.append("It fits." if plan["fits"] else "It does not fit.")
    largest = plan["largest_context"]
    if largest:
        beyond = " (more than the model knows)" if largest > plan["model_context"] else ""
        lines.append(f"The largest context that would fit is {largest:,} tokens{beyond}.")
    else:
        lines.append("No context fits.")
    return lines


def _scalars(config: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a config says in single values; the text part of a nested one."""
    text = config.get("text_config") or config
    values = dict(text)
    values |= values.pop("rope_parameters", None) or {}
    return [
        (key, value)
        for key, value in values.items()
        if isinstance(value, (int, float, str)) and key != "transformers_version"
    ]


def _yes(value: object) -> str:
    return "yes" if value else "no"
