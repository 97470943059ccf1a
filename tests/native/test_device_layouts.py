"""What CUDA kernels rely on, on the host: which lane holds what, what fits in shared memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kslserve.engine import device_budget
from tests.native.emulated import build
from tests.native.objects import ROOT, build_module

SWAPPED = ("a", "b", "scale_a", "scale_b", "weights", "activations")


def _compile(name: str, folder: Path) -> Path:
    program = folder / name
    flags = ["-O1" if flag == "-O3" else flag for flag in build_module().COMMON_FLAGS]
    source = ROOT / f"native/tests/{name}.cc"
    command = [*build_module()._compiler(), *flags, "-Werror", str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _compile("test_lanes", tmp_path_factory.mktemp("lanes"))


def test_block_scaled_products_by_lane_equal_plain_sums(lanes: Path) -> None:
    for seed in range(1, 21):
        done = subprocess.run([lanes, str(seed)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", SWAPPED)
def test_a_swapped_lane_is_noticed_in_both_products(lanes: Path, what: str) -> None:
    done = subprocess.run([lanes, "1", what], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "wrong: mxf8f6f4" in done.stderr
    assert "wrong: mxf4nvf4" in done.stderr


def test_blocks_fit_in_the_shared_memory_of_devices(tmp_path: Path) -> None:
    done = subprocess.run(
        [_compile("test_shares", tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_products_of_slices_are_planned() -> None:
    """The constants of the plan are those that test_shares holds engines to on every device."""
    shares = (ROOT / "native/cuda/gemm/shares.cuh").read_text()
    assert f"kMaxSlices = {device_budget._SLICES};" in shares
    assert f"kSlicedTokens = {device_budget._SLICED_COLUMNS};" in shares


def test_graphs_are_planned() -> None:
    state = (ROOT / "native/cuda/state.cuh").read_text()
    opening = (ROOT / "native/cuda/open.cu").read_text()
    assert f"kGraphs = {device_budget._GRAPHS}," in state
    assert f"kKernelBytes = {device_budget._KERNEL_BYTES >> 10} << 10;" in opening
    kernels = f"({device_budget._LAYER_KERNELS} * (s->layers + s->mtp_layers) + "
    assert kernels + f"{device_budget._OTHER_KERNELS})" in opening


def test_the_build_finds_kernels_that_spill() -> None:
    said = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4fast' for 'sm_120a'
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 80 registers, used 2 barriers, 16 bytes cumulative stack size
ptxas info    : Compiling entry function '_Z4slow' for 'sm_90a'
    64 bytes stack frame, 100 bytes spill stores, 276 bytes spill loads
"""
    build = build_module()
    assert build._spills(said) == ["_Z4slow for sm_90a: 100 bytes stored, 276 loaded"]
    assert build._spills("") == []


# ------------------------------------------------------------ whole kernels, lane by lane

EMULATED = {
    "test_emulated_prompt": ["attn/prompt"],
    "test_emulated_delta": ["gdn/chunk_prepare", "gdn/chunk_scan"],
    "test_emulated_tile": ["attn/tile", "attn/tile_join"],
    "test_emulated_stream": ["gemm/pack", "gemm/nvfp4", "gemm/e2m3", "gemm/bf16"],
}
MATRICES = ("plain", "transposed")  # loads of them
WITHOUT_MATRICES = ("test_emulated_tile", "test_emulated_stream")  # nothing changes there
# Cases of a program that two lanes of an operand, or of sums, must spoil: all of them, but for
# products of fewer tokens than the lanes' numbers.
CASES = {"test_emulated_prompt": 9, "test_emulated_delta": 3, "test_emulated_tile": 54}
STREAM_CASES = {"a": 58, "b": 27, "sum": 27}
ORDERS = [(str(warp), copies) for warp in range(6) for copies in ("late", "early")]
# Not run by a program, but beside what it runs.
OTHER_KERNELS = ("block_scaled.cuh", "quads.cuh", "wide.cuh", "wide_fp8.cuh")
PACE = (
    "stream.cuh: bulk_wait(shared_at(&loaded), 0);",  # lets others go first, which may be late
    "stream.cuh: if (!kNorm && a.adds) cluster_began();",  # for tools, see bulk.cuh
)


@pytest.fixture(scope="module", params=sorted(EMULATED))
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(request.param, EMULATED[request.param], tmp_path_factory.mktemp(request.param))


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_emulated_kernels_equal_plain_sums(emulated: Path) -> None:
    """In several orders of threads and copies."""
    for rest in (["1"], ["2", "none", *ORDERS[1]]):
        done = _run(emulated, *rest)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", ["a", "b", "sum", *MATRICES])
def test_a_swapped_lane_of_halves_is_noticed(emulated: Path, what: str) -> None:
    """Of products and of loads of matrices; in every format and head size, in outputs and state."""
    cases = CASES.get(emulated.name) or STREAM_CASES.get(what, 0)
    if what in MATRICES and emulated.name in WITHOUT_MATRICES:
        cases = 0
    done = _run(emulated, "1", what)
    assert done.returncode == (1 if cases else 0), done.stderr
    assert done.stderr.count("wrong:") == cases, done.stderr


def test_a_missing_wait_is_noticed(emulated: Path) -> None:
    """Every wait for a copy, a ring or a block, left out: some order of the threads shows it, in
    results or in threads that wait for ever."""
    waits = (emulated.parent / "waits.txt").read_text(encoding="utf-8").splitlines()
    for number, wait in enumerate(waits):
        if wait.split(":")[0] in OTHER_KERNELS or wait in PACE:
            continue
        assert any(_run(emulated, "1", str(number), *order).returncode for order in ORDERS), wait
