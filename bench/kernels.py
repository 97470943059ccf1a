"""Single kernels of the CPU backend on the matrices of a model, beside the limits of this machine
measured in the same run.

    python -m bench.kernels [--shape synth:0.8b] [--cpu auto] [--threads 0]
                            [--encodings e2m3,nvfp4] [--columns 1,8,512] [--save]

Few columns are bound by memory: `gb_s` counts the packed matrix, which no cache holds from one
repetition to the next, and `ratio` is its share of the read rate measured just before. Many columns
are bound by arithmetic: `gop_s`, two operations per weight and column, and its share of the peak of
the unit in use. The scan of the delta rule is given per token, for one layer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from bench.report import Report
from kslserve.engine.codecs import ENC_BF16, ENC_E2M3, ENC_F32, ENC_NVFP4, encoding_sizes
from kslserve.engine.model import ModelSpec
from kslserve.ksl.layout import HEAD, expected, role
from kslserve.ksl.open import open_source
from tests.native.objects import ROOT, kernel_sources, link

ENCODINGS = {"f32": ENC_F32, "bf16": ENC_BF16, "e2m3": ENC_E2M3, "nvfp4": ENC_NVFP4}
FORMS = {"e2m3": "int8", "nvfp4": "int8", "bf16": "bf16"}  # activations; of others float
READ_BYTES = 1 << 30
MEMORY_BOUND_COLUMNS = 8


class Program:
    """bench/kernels.cc, compiled with the flags of the build and answering one line at a time."""

    def __init__(self, cpu: str = "auto", threads: int = 0) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))
        self._folder = tempfile.TemporaryDirectory()
        common = [ROOT / f"native/common/{name}.cc" for name in ("pool", "alloc", "error")]
        target = Path(self._folder.name) / "kernels"
        link(ROOT / "bench/kernels.cc", [*kernel_sources(), *common], target)
        self._process = subprocess.Popen(
            [str(target), cpu, str(self.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the kernel program ended at `{line}`")
        return answer.strip()

    def read_rate(self, size: int = READ_BYTES) -> float:
        """Bytes per second at which all threads together read a buffer again and again."""
        return size / float(self.ask(f"read {size}"))

    def peak(self, form: str) -> float:
        """Operations per second of the unit that products of this form use; 0 where this path has
        none. One of bf16 does twice what one of float32 does."""
        if form == "bf16":
            return 2 * float(self.ask("float")) if self.has_bf16() else 0.0
        return float(self.ask(form))

    def has_bf16(self) -> bool:
        return self.ask("bf16") == "yes"

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(rows, cols) of every quantized matrix of one layer of each kind and of the head, by the end
    of its name; equal shapes once."""
    shapes = expected(spec)
    found = {"lm_head": (spec.vocab, spec.hidden)}
    for name, size in shapes.items():
        if name != HEAD and role(name) and size not in found.values():
            found[name.removesuffix(".weight").rpartition(".")[2]] = size
    return found


def products(args: argparse.Namespace, report: Report, program: Program, spec: ModelSpec) -> None:
    for encoding in args.encodings.split(","):
        form, number = FORMS.get(encoding, "float"), ENCODINGS[encoding]
        if form == "bf16" and not program.has_bf16():
            form = "float"
        peak = program.peak(form)
        report.add(f"peak_{form}", gop_s=peak / 1e9)
        for columns in map(int, args.columns.split(",")):
            for name, (rows, cols) in matrices(spec).items():
                if columns > MEMORY_BOUND_COLUMNS and name == "lm_head":
                    continue  # no prompt column but the last needs it
                case = f"{encoding}_{columns}_{name}"
                reads = program.read_rate() if columns <= MEMORY_BOUND_COLUMNS else 0.0
                seconds = float(program.ask(f"gemm {form} {number} {rows} {cols} {columns}"))
                size = sum(encoding_sizes(number, rows, cols))
                rates = {
                    "us": seconds * 1e6,
                    "gb_s": size / seconds / 1e9,
                    "gop_s": 2 * rows * cols * columns / seconds / 1e9,
                }
                if reads:
                    share, of = size / seconds / reads, f"read rate, {reads / 1e9:.1f} GB/s"
                else:
                    share = 2 * rows * cols * columns / seconds / peak if peak else 0.0
                    of = "peak"
                report.add(case, rows=rows, cols=cols, **rates, ratio=share, of=of)


def others(report: Report, program: Program, spec: ModelSpec) -> None:
    for columns in (1, 512):
        seconds = float(program.ask(f"quantize {spec.hidden} {columns}"))
        report.add(f"quantize_{columns}", us=seconds * 1e6)
    if not spec.lin_value_heads:
        return
    heads, dk, dv = spec.lin_value_heads, spec.lin_key_dim, spec.lin_value_dim
    peak = program.peak("float")
    for tokens in (1, 8, 512):
        seconds = float(program.ask(f"scan {heads} {dk} {dv} {tokens}"))
        # Seven operations per element of the state: a product and three multiply-adds.
        share = 7 * heads * dk * dv * tokens / seconds / peak if peak else 0.0
        report.add(
            f"scan_{tokens}", us_per_token=seconds / tokens * 1e6, ratio=share, of="float peak"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="synth:0.8b")
    parser.add_argument("--cpu", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--encodings", default="e2m3,nvfp4")
    parser.add_argument("--columns", default="1,8,512")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    source = open_source(args.shape)
    spec = source.spec
    source.close()
    report = Report("kernels")
    with Program(args.cpu, args.threads) as program:
        report.add("machine", isa=program.ask("name"), threads=program.threads)
        products(args, report, program, spec)
        others(report, program, spec)
    report.write(args.save)


if __name__ == "__main__":
    main()
