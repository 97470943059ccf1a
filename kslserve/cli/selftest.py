"""`python -m kslserve selftest`: whether this machine's backend computes what it should, and how
fast. Made for the first owner of a card that nobody has run this on.

Exit status 0; 1 when a result is wrong; 2 when the test cannot run.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from kslserve.errors import EngineError, KslError, ModelFileError

if TYPE_CHECKING:
    from kslserve.engine.model import ModelSpec, PoolSizes, TensorArg
    from kslserve.engine.native import NativeEngine
    from kslserve.selftest.parity import Parity

EXIT_WRONG = 1
EXIT_CANNOT = 2
BLOCK = 128
CONTEXT = 2048
PROMPT = 4096
STREAMS = 8
WAVE_COLUMNS = {"cuda": 2048, "cpu": 512}
SHARE = 0.8  # of the free memory, for the model that is timed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Compare a backend with the scalar reference, then time it."
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--seed", type=int, help="of the random models (default: a new one)")
    parser.add_argument("--no-bench", action="store_true", help="only compare")
    parser.add_argument(
        "--quick", action="store_true", help="one combination of each kind instead of all"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report as it grows; the exit status."""
    from kslserve.engine.cuda import device_present, load_library
    from kslserve.engine.native import CPU_LIBRARY

    device = args.device
    if device == "auto":
        device = "cuda" if device_present() else "cpu"
    begun = time.monotonic()
    try:
        library = load_library() if device == "cuda" else CPU_LIBRARY
        wrong = _compare(
            library, secrets.randbits(31) if args.seed is None else args.seed, args.quick
        )
        if not args.no_bench:
            asyncio.run(_time(library, device))
    except KslError as error:
        print(f"selftest: {error}")
        return EXIT_CANNOT
    verdict = f"{wrong} WRONG" if wrong else "all right"
    print(f"{device}: {verdict}, {time.monotonic() - begun:.0f} s")
    return EXIT_WRONG if wrong else 0


def _combinations(quick: bool, device: bool) -> Iterator[tuple[str, str, str, bool]]:
    """Shape, encoding and KV format: every encoding and every format with the real heads, and the
    sizes that fit nothing. Last whether a device takes the kernels that others need."""
    from kslserve.engine.native import KV_FORMATS
    from kslserve.selftest.models import ENCODINGS

    if quick:
        yield from (("ragged", "nvfp4", "bf16", False), ("heads", "fp6", "q4", False))
        return
    for encoding in ENCODINGS:
        yield "ragged", encoding, "bf16", False
        yield "heads", encoding, "bf16", False
    for kv in KV_FORMATS:
        if kv != "bf16":
            yield "heads", "nvfp4", kv, False
    for kv in ("bf16", "fp8", "q4") if device else ():
        yield "heads", "bf16", kv, True


def _compare(library: Any, seed: int, quick: bool) -> int:
    """The number of wrong results."""
    from kslserve.engine.native import CPU_LIBRARY
    from kslserve.selftest.models import SHAPES, random_tensors
    from kslserve.selftest.parity import compare

    print(f"seed {seed}; distance of logits from the scalar reference (same best id)")
    wrong = 0
    for shape, encoding, kv, portable in _combinations(quick, library is not CPU_LIBRARY):
        spec = SHAPES[shape]
        tensors = random_tensors(spec, encoding, seed)
        # On a device only packed weights have more than one.
        several = library is CPU_LIBRARY or encoding in ("fp6", "nvfp4")
        for arithmetic in ("float", "auto") if several else ("auto",):
            # The CPU's paths share their integers; a device is measured against float32.
            own = arithmetic if library is CPU_LIBRARY else "float"
            reference = partial(_open, CPU_LIBRARY, kv, own, "scalar")
            label = f"{shape:7}{encoding:6} KV {kv:5} {'portable' if portable else arithmetic:8}"
            subject = partial(_open, library, kv, arithmetic, "auto", portable=portable)
            try:
                results = compare(subject, reference, spec, tensors, seed)
            except ModelFileError as error:  # a form that this backend does not have
                print(f"{label} not compared: {error}")
                continue
            except EngineError as error:
                wrong += 1
                print(f"{label} WRONG: {error}", flush=True)
                continue
            wrong += sum(not result.right for result in results)
            print(label, "  ".join(map(_show, results)), flush=True)
    return wrong


def _show(result: Parity) -> str:
    mark = "" if result.right else " WRONG"
    return f"{result.rows} {result.error:.1e} ({100 * result.same_best:.0f} %){mark}"


def _open(
    library: Any,
    kv: str,
    activations: str,
    isa: str,
    spec: ModelSpec,
    tensors: list[TensorArg],
    sizes: PoolSizes,
    portable: bool = False,
) -> NativeEngine:
    from kslserve.engine.native import CPU_LIBRARY, NativeEngine

    return NativeEngine.open(
        spec,
        tensors,
        sizes,
        kv_format=kv,
        activations=activations,
        isa=isa if library is CPU_LIBRARY else "auto",
        portable=portable,
        library=library,
    )


async def _time(library: Any, device: str) -> None:
    """Decode and prompt speed of the largest shape that fits, for the weights that are served."""
    from kslserve.ksl.open import open_model
    from kslserve.selftest import speed
    from kslserve.selftest.waves import Waves

    shape, free = _largest(library, device)
    bandwidth = float(library.read_bandwidth(min(free // 4, 4 << 30))) if device == "cuda" else 0.0
    if bandwidth:
        print(f"reads {bandwidth / 1e9:.0f} GB/s")
    kv = "q4" if device == "cuda" else "bf16"
    for weights in ("nvfp4", "fp6"):
        with open_model(f"synth:{shape}", weights=weights) as model:
            engine = _open(library, kv, "auto", "auto", model.spec, model.tensors, _pools(device))
        with Waves(engine) as waves:
            info = engine.info
            print(f"{shape} {weights}, KV {kv}: reads {info.token_bytes / 1e9:.2f} GB a token")
            for streams in (1, STREAMS):
                found = await speed.decode(waves, streams, CONTEXT)
                share = (
                    found.tokens_per_s / streams * info.token_bytes / bandwidth if bandwidth else 0
                )
                note = f", {100 * share:.0f} % of the read rate" if share else ""
                print(f"  {found.what}: {found.tokens_per_s:.1f} tok/s{note}", flush=True)
            found = await speed.prompt(waves, PROMPT)
            print(f"  {found.what}: {found.tokens_per_s:.0f} tok/s", flush=True)


def _pools(device: str) -> PoolSizes:
    from kslserve.engine.model import PoolSizes
    from kslserve.selftest.speed import STEPS, WARM_UP

    per_slot = -(-max(PROMPT, CONTEXT + WARM_UP + STEPS) // BLOCK)
    return PoolSizes(
        slots=STREAMS,
        slabs=STREAMS,
        blocks=per_slot * STREAMS,
        block_tokens=BLOCK,
        blocks_per_slot=per_slot,
        wave_columns=WAVE_COLUMNS[device],
    )


def _largest(library: Any, device: str) -> tuple[str, int]:
    """The largest shape whose FP6 weights and pools fit, and the free bytes. The CPU takes the
    smallest: it is to end soon."""
    from kslserve.engine.codecs import encoded_bytes
    from kslserve.ksl import policy
    from kslserve.ksl.report import open_for_report
    from kslserve.ksl.synth import SHAPES

    free = int(library.free_bytes()) if device == "cuda" else 0
    names = list(SHAPES)
    for name in names[:-1] if device == "cuda" else ():
        source = open_for_report(f"synth:{name}", "")
        try:
            weights = encoded_bytes(policy.plan(source, "fp6", "auto").tensors)
        finally:
            source.close()
        if weights < SHARE * free - (6 << 30):
            return name, free
    return names[-1], free
