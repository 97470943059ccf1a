"""Every kernel that this device runs, in a few waves of small models: for tools that make kernels a
hundred times slower than they are.

    python -m tests.device.sanitized [memcheck racecheck ...]
    python -m tests.device.sanitized --waves [MODEL ...]
    python -m tests.device.sanitized --missing

The first runs the waves under these tools of compute-sanitizer, by default both, one model after
the other, and fails where one finds something. The second just runs those of some models, by
default of all. The third, under ncu, names the kernels of the sources that the waves do not launch:
those for other devices, and the one that faults on purpose.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench.ncu import read
from kslserve.core.sampling import SamplingParams
from kslserve.engine.cuda import CudaLibrary, find_library, load_library
from kslserve.engine.model import FILL_UNIFORM, Fill, ModelSpec, TensorArg
from kslserve.engine.types import Draft, OpKind, Row, RowKind, StateOp
from tests.device.races import Code, findings
from tests.device.shapes import spec_named
from tests.native.driver import Driver, Stream
from tests.tiny import tiny_arrays, tiny_tensors

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck")
PROGRAM = "compute-sanitizer"
# Keys behind some rows: enough to divide tiles; plain attention needs few.
PLAIN_DEPTH, DEPTH = 300, 2000
IDS = np.random.default_rng(4).integers(0, 199, 80).astype(np.int32)
HOT = SamplingParams(
    temperature=1.0,
    top_k=20,
    top_p=0.9,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logit_bias=((7, 2.0),),
)


def heads() -> ModelSpec:
    """One head of keys of each kind of layer, as large as those of the 27B."""
    return replace(
        spec_named("27b-heads"),
        vocab=203,
        token_limit=199,
        intermediate=256,
        layer_kinds=("linear", "full"),
        heads=6,
        kv_heads=1,
        lin_key_heads=1,
        lin_value_heads=3,
    )


def tensors_of(spec: ModelSpec, policy: str) -> list[TensorArg]:
    """policy: one of tiny_tensors, or `made`: NVFP4 and FP6 matrices that the device makes."""
    if policy != "made":
        return tiny_tensors(spec, tiny_arrays(spec), policy)
    tensors = []
    for index, tensor in enumerate(tiny_tensors(spec, tiny_arrays(spec), "mixed")):
        plain = tensor.encoding < 2
        fill = Fill(FILL_UNIFORM, index, 0.06)
        encoding = tensor.encoding if plain else 2 + index % 3
        tensors.append(TensorArg(tensor.name, encoding, tensor.rows, tensor.cols, fill=fill))
    return tensors


def deep(stream: Stream, depth: int, n: int, kind: RowKind = RowKind.PREFILL) -> Row:
    """Columns behind keys that nobody has computed: the pool's zeros cost as much to read."""
    return Row(kind, stream.slot, stream.slab, depth, n, IDS[:n])


def rows(driver: Driver, depth: int, *, drafts: bool) -> None:
    """Prompts, cuts, given drafts, and rows behind `depth` keys; drafts: MTP's too."""
    first, long, other, third = (driver.begin(slot, sampling=HOT) for slot in range(4))
    wave = [
        long.row(RowKind.PREFILL, IDS[:70], cuts=((30, 6),)),
        first.row(RowKind.LAST, IDS[:9], propose=2 * drafts),
    ]
    for stream, row in zip((long, first), driver.wave(wave).rows, strict=True):
        stream.position = row.position
    driver.wave([deep(third, depth, 70), deep(other, depth, 30)])
    first.run(first.row(RowKind.VERIFY, [-1, 5, 6, 7], draft=Draft.GIVEN, propose=2 * drafts))
    if drafts:
        first.run(first.row(RowKind.VERIFY, [-1], 3, draft=Draft.OWN))


def columns(driver: Driver, depth: int) -> None:
    """Products of every number of columns, and two rows of one behind `depth` keys."""
    stream, other = driver.begin(0, sampling=HOT), driver.begin(1, sampling=HOT)
    for n in (1, 2, 4, 7, 16, 30):
        stream.prefill(IDS[:n])
    driver.wave([deep(stream, depth, 1, RowKind.LAST), deep(other, depth, 1, RowKind.LAST)])


def steps(driver: Driver) -> None:
    """Rows of one token: so many that their states come into shared memory, and fewer."""
    streams = [driver.begin(slot, first_block=slot) for slot in range(6)]
    cuts = [((1, 6 + n),) if n < 4 else () for n in range(6)]
    driver.wave(
        [s.row(RowKind.PREFILL, IDS[:1], cuts=c) for s, c in zip(streams, cuts, strict=True)]
    )
    driver.wave([deep(stream, 1, 1) for stream in streams[:4]])


def prompts(driver: Driver) -> None:
    """Those rows that other devices have kernels of their own for."""
    driver.begin(0).prefill(IDS[:70])
    driver.wave([deep(driver.begin(1), DEPTH, 70)])


def states(driver: Driver) -> None:
    """Samplings, scores, graphs and state operations."""
    stream = driver.begin(0, sampling=HOT, prompt_ids=IDS[:9])
    stream.last(IDS[:9])
    stream.decode(3)  # the second makes a graph, the third is one
    driver.wave(before=[StateOp(OpKind.MASK, 0, data=np.full(7, 0x55555555, np.uint32))])
    stream.run(stream.row(RowKind.LAST, [-1], top_n=3))
    stream.run(stream.row(RowKind.SCORE, np.append(IDS[:6], np.int32(-1)), 6, top_n=3))
    image, block = driver.slab_image(0), driver.block_image(0)
    ops = [StateOp(OpKind.LOAD_SLAB, 7, data=image), StateOp(OpKind.LOAD_BLOCK, 60, data=block)]
    ops += [StateOp(OpKind.COPY_SLAB, 7, 8), StateOp(OpKind.COPY_BLOCK, 60, 61)]
    driver.wave(before=ops)


def single(driver: Driver) -> None:
    driver.begin(0).prefill([5])


def models() -> dict[str, tuple[ModelSpec, str, dict[str, Any], Callable[[Driver], None]]]:
    """By name: a spec, how its tensors are encoded, options of the driver, its waves."""
    tiny = replace(spec_named("tiny"), layer_kinds=("linear", "full"))
    many = replace(heads(), hidden=1536, lin_value_heads=48)
    packed = partial(rows, depth=DEPTH, drafts=False)
    streamed = partial(columns, depth=DEPTH)
    return {
        "any-sizes": (tiny, "mixed", {"kv": "f32"}, partial(rows, depth=PLAIN_DEPTH, drafts=True)),
        "any-columns": (tiny, "mixed", {"kv": "f32"}, partial(columns, depth=PLAIN_DEPTH)),
        "made": (tiny, "made", {"kv": "bf16"}, single),
        "nvfp4": (heads(), "nvfp4", {"kv": "q4"}, partial(rows, depth=DEPTH, drafts=True)),
        "nvfp4-columns": (heads(), "nvfp4", {"kv": "q4"}, streamed),
        "states": (heads(), "nvfp4", {"kv": "q4"}, states),
        "fp6": (heads(), "e2m3", {"kv": "fp8"}, packed),
        "fp6-columns": (heads(), "e2m3", {"kv": "fp8"}, streamed),
        "bf16": (heads(), "bf16", {"kv": "bf16"}, packed),
        "bf16-columns": (heads(), "bf16", {"kv": "bf16"}, streamed),
        "steps": (many, "nvfp4", {"kv": "q4"}, steps),
        "portable": (heads(), "nvfp4", {"kv": "q4", "portable": True}, prompts),
    }


MODELS = tuple(models())


def waves(library: CudaLibrary, names: Sequence[str]) -> None:
    for name in names:
        spec, policy, options, use = models()[name]
        begun = time.monotonic()
        sizes = {"blocks": 4 * 132, "blocks_per_slot": 132, "wave_columns": 128}
        driver = Driver(
            spec, tensors_of(spec, policy), library=library, activations="auto", **sizes, **options
        )
        with driver:
            use(driver)
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)
    library.read_bandwidth(1 << 20)


def under(tool: str, model: str) -> str:
    """What a tool says to the waves of a model. AssertionError where it found something, or they
    failed."""
    program = shutil.which(PROGRAM) or f"/usr/local/cuda/bin/{PROGRAM}"
    command = [program, "--tool", tool, "--print-limit", "1000"]
    command += [sys.executable, "-m", "tests.device.sanitized", "--waves", model]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    assert "SUMMARY: " in text
    library = find_library()
    assert library is not None
    found = findings(text, Code(library).at)
    assert not found, f"{found}: {text[-4000:]}"
    return text


def missing() -> set[str]:
    """Kernels of the sources that the waves do not launch."""
    command = ["ncu", "--csv", "--metrics", "gpu__time_duration.sum", "--clock-control", "none"]
    command += ["--kernel-id", "::regex:.+:1"]  # each kernel once
    command += [sys.executable, "-m", "tests.device.sanitized", "--waves"]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    launched = {kernel.name for kernel in read(out[out.index('"ID"') :])}
    text = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "native/cuda").rglob("*.cu*")
    )
    head = re.compile(r"__global__\s+void\s+((?:\w+\((?:[^()]|\([^()]*\))*\)\s*)*)(\w+)\(")
    return {found[2] for found in head.finditer(text)} - launched


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--waves"]:
        waves(load_library(), arguments[1:] or MODELS)
        return 0
    if arguments == ["--missing"]:
        print(*sorted(missing()))
        return 0
    for tool, model in product(arguments or TOOLS, MODELS):
        begun = time.monotonic()
        print(
            under(tool, model), f"{tool}: nothing in {time.monotonic() - begun:.0f} s", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
