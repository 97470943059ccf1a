"""Device memory: what is planned is what is taken, and what does not fit is refused first."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from _kslserve import lib

from kslserve.engine.budget import slot_bytes
from kslserve.engine.codecs import encoded_bytes
from kslserve.engine.cuda import CudaLibrary
from kslserve.engine.device_budget import device_workspace_bytes, driver_bytes
from kslserve.engine.model import FILL_CONSTANT, Fill, PoolSizes, TensorArg
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Draft, OpKind, Row, RowKind, StateOp
from kslserve.errors import EngineError, ModelFileError
from kslserve.ksl import layout
from kslserve.ksl.open import open_model
from kslserve.selftest.waves import Waves
from tests.device.shapes import spec_named
from tests.native.driver import Driver, Refused
from tests.resident import resident
from tests.tiny import tiny_arrays, tiny_tensors

SIZES = PoolSizes(
    slots=4, slabs=12, blocks=512, block_tokens=128, blocks_per_slot=128, wave_columns=1028
)
PAGE = 8 << 20  # to which the driver may round


@pytest.mark.parametrize("weights", ["nvfp4", "fp6", "bf16"])
async def test_what_is_taken_was_planned(cuda: CudaLibrary, weights: str) -> None:
    free = cuda.free_bytes()
    with open_model("synth:0.8b", weights=weights) as model:
        spec, planned = model.spec, encoded_bytes(model.tensors)
        engine = NativeEngine.open(spec, model.tensors, SIZES, kv_format="q4", library=cuda)
    with Waves(engine) as waves:
        taken = free - cuda.free_bytes()
        info = engine.info
        told = info.weight_bytes + info.pool_bytes + info.scratch_bytes
        assert abs(taken - told) < 0.01 * told + PAGE
        scratch = device_workspace_bytes(spec, "q4", 4, 1028, 128, 128)
        assert info.scratch_bytes == pytest.approx(scratch, rel=0.03)
        assert info.weight_bytes == pytest.approx(planned, rel=0.03)
        pools = SIZES.slabs * info.slab_bytes + SIZES.blocks * info.block_bytes
        pools += SIZES.slots * slot_bytes(spec, SIZES.blocks_per_slot)
        assert info.pool_bytes == pytest.approx(pools, rel=0.01)
        # Prompts, decode and its graphs stay inside what is set apart for the driver.
        await waves.begin(range(4))
        ids = np.arange(1000, dtype=np.int32) + 5
        await waves.run(rows=[Row(RowKind.LAST, 0, 0, 0, 1000, ids)])
        for slots in (1, 2, 3, 4):
            for step in range(4):
                rows = [Row(RowKind.LAST, s, s, 2000 + step, 1, [7]) for s in range(slots)]
                await waves.run(rows=rows)
        assert free - cuda.free_bytes() < taken + driver_bytes(spec)
    assert free - cuda.free_bytes() < driver_bytes(spec), "all of it is given back"


def graph_sizes() -> PoolSizes:
    return dataclasses.replace(SIZES, slots=12, slabs=12, blocks=12 * 40, blocks_per_slot=40)


async def test_graphs_are_bounded(cuda: CudaLibrary) -> None:
    """Waves of ever new shapes: after as many graphs as are kept, neither memory grows."""
    with open_model("synth:0.8b", weights="nvfp4") as model:
        engine = NativeEngine.open(
            model.spec, model.tensors, graph_sizes(), kv_format="q4", library=cuda
        )

    async def every_shape(waves: Waves) -> None:
        """Rows of drafts beside rows of one token without a sample."""
        for slots, columns in itertools.product((1, 2, 4, 8, 12), range(1, 9)):
            for silent in range(slots):
                if (slots - silent) * columns + silent > 64:
                    continue
                ids = np.full(columns, 7, np.int32)
                rows = [Row(RowKind.PREFILL, s, s, 500, 1, ids[:1]) for s in range(silent)]
                rows += [
                    Row(RowKind.VERIFY, s, s, 500, columns, ids, draft=Draft.GIVEN)
                    for s in range(silent, slots)
                ]
                for _ in range(3):  # seen, captured, launched
                    await waves.run(rows=rows)

    with Waves(engine) as waves:
        await waves.begin(range(12))
        taken = []
        for _ in range(3):
            await every_shape(waves)
            taken.append((resident(), -cuda.free_bytes()))
        progress = engine.progress()
        assert progress.graphs < progress.graphs_made, "they do not fit"
        host, device = zip(*taken, strict=True)
        assert host[-1] - host[1] < 16 << 20
        assert device[-1] - device[1] < 16 << 20


async def test_graphs_are_updated(cuda: CudaLibrary) -> None:
    """Waves behind ever other numbers of keys take the graphs that there are, and no memory."""
    with open_model("synth:0.8b", weights="nvfp4") as model:
        engine = NativeEngine.open(
            model.spec, model.tensors, graph_sizes(), kv_format="q4", library=cuda
        )

    async def every_length(waves: Waves) -> None:
        for slots in (1, 2, 3, 5, 12):
            for position in (100, 600, 2000, 5000, 900, 300):
                rows = [Row(RowKind.LAST, s, s, position, 1, [7]) for s in range(slots)]
                for _ in range(40):
                    await waves.run(rows=rows)

    with Waves(engine) as waves:
        await waves.begin(range(12))
        await every_length(waves)
        host, device = resident(), cuda.free_bytes()
        made = engine.progress().graphs_made
        assert made <= 10, "of each shape one for few keys and one for many"
        for _ in range(3):
            await every_length(waves)
        assert engine.progress().graphs_made == made
        assert resident() - host < 4 << 20
        assert device - cuda.free_bytes() < 4 << 20


def test_what_does_not_fit_is_refused_before_it_is_taken(cuda: CudaLibrary) -> None:
    free = cuda.free_bytes()
    sizes = dataclasses.replace(SIZES, blocks=1 << 22)
    with (
        open_model("synth:0.8b", weights="nvfp4") as model,
        pytest.raises(EngineError, match=r"GiB free of .* are needed: weights .* Fewer blocks"),
    ):
        NativeEngine.open(model.spec, model.tensors, sizes, kv_format="q4", library=cuda)
    assert free - cuda.free_bytes() < PAGE


async def test_state_moves_beside_the_rows(cuda: CudaLibrary) -> None:
    """More images than the staging area holds, in and out while rows run: each arrives whole, and
    what rows of the same wave change is saved as it was before them."""
    with open_model("synth:0.8b", weights="nvfp4") as model:
        engine = NativeEngine.open(model.spec, model.tensors, SIZES, kv_format="q4", library=cuda)
    with Waves(engine) as waves:
        info, rng = engine.info, np.random.default_rng(1)
        await waves.begin([0])
        ids = np.arange(600, dtype=np.int32) + 5
        await waves.run(rows=[Row(RowKind.LAST, 0, 0, 0, 600, ids)])
        own = np.zeros(info.slab_bytes, np.uint8)
        await waves.run(before=[StateOp(OpKind.SAVE_SLAB, 0, 0, own)])
        slabs = [rng.integers(0, 255, info.slab_bytes).astype(np.uint8) for _ in range(6)]
        blocks = [rng.integers(0, 255, info.block_bytes).astype(np.uint8) for _ in range(24)]
        half = info.slab_bytes // 2
        loads = [StateOp(OpKind.LOAD_BLOCK, 300 + i, 0, b) for i, b in enumerate(blocks)]
        for i, slab in enumerate(slabs):
            loads += [StateOp(OpKind.LOAD_SLAB, 4 + i, at, slab[at : at + half])
                      for at in (0, half)]  # fmt: skip
        assert sum(op.data.nbytes for op in loads) > 64 << 20
        seen = np.zeros(info.slab_bytes, np.uint8)
        decode = [Row(RowKind.LAST, 0, 0, 600, 1, [-1])]
        await waves.run(before=[StateOp(OpKind.SAVE_SLAB, 0, 0, seen)], rows=decode, after=loads)
        assert np.array_equal(seen, own)
        out = [np.zeros(info.slab_bytes, np.uint8) for _ in slabs]
        out_blocks = [np.zeros(info.block_bytes, np.uint8) for _ in blocks]
        saves = [StateOp(OpKind.SAVE_SLAB, 4 + i, 0, image) for i, image in enumerate(out)]
        saves += [StateOp(OpKind.SAVE_BLOCK, 300 + i, 0, b) for i, b in enumerate(out_blocks)]
        spoiled = [StateOp(OpKind.ZERO_SLAB, 4 + i) for i in range(len(slabs))]
        rows = [Row(RowKind.LAST, 0, 0, 601, 1, [-1])]
        await waves.run(before=saves + spoiled, rows=rows)
        for image, found in zip([*slabs, *blocks], [*out, *out_blocks], strict=True):
            assert np.array_equal(image, found)


def test_every_failing_allocation(cuda: CudaLibrary, capfd: pytest.CaptureFixture[str]) -> None:
    """What the engine needs is refused with a sentence and leaves nothing behind; what it can do
    without costs a line of log and no bit of an answer."""
    spec = dataclasses.replace(spec_named("tiny"), layer_kinds=("linear", "full"))
    tensors = tiny_tensors(spec, tiny_arrays(spec), "mixed")

    def answer(fail_alloc_at: int) -> list[int]:
        with Driver(spec, tensors, library=cuda, fail_alloc_at=fail_alloc_at) as driver:
            stream = driver.begin(0)
            return [stream.last([5, 6, 7]), *stream.decode(4)]

    expected = answer(0)
    free = cuda.free_bytes()
    refused: list[tuple[Any, ...]] = []
    lines: list[str] = []
    for n in range(1, 2000):
        try:
            found = answer(n)
        except Refused as refusal:
            refused.append(refusal.args)
            continue
        assert found == expected
        said = capfd.readouterr().err.splitlines()
        if not said:
            break
        lines += said
    assert len(refused) > 100
    assert {code for code, _ in refused} == {lib.KSL_NOMEM}
    assert all("memory" in text for _, text in refused)
    assert [line.split(" (")[0] for line in lines] == [
        "kslserve: no pinned memory or thread to move state with; waves will wait",
        "kslserve: no memory for 2 state operations; their wave waits for them",
        "kslserve: no CUDA graph could be made",
    ]
    assert free - cuda.free_bytes() < PAGE


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hidden": 1 << 15}, "takes a hidden size of at most"),
        ({"head_dim": 512}, "takes attention heads of at most"),
        ({"lin_value_dim": 512}, "takes linear heads of at most"),
    ],
)
def test_shapes_that_it_does_not_take(cuda: CudaLibrary, change: dict[str, int], text: str) -> None:
    spec = dataclasses.replace(spec_named("tiny"), **change)
    tensors = [
        TensorArg(name, 0, *shape, fill=Fill(FILL_CONSTANT, scale=0.25))
        for name, shape in {**layout.expected(spec), layout.HEAD: (spec.vocab, spec.hidden)}.items()
    ]
    with pytest.raises(ModelFileError, match=text):
        NativeEngine.open(spec, tensors, SIZES, kv_format="bf16", library=cuda)


@pytest.mark.parametrize("kv", ["int8_g64", "int4_g32", "int8ring_int4"])
def test_formats_that_it_does_not_have(cuda: CudaLibrary, kv: str) -> None:
    spec = spec_named("round")
    tensors = tiny_tensors(spec, tiny_arrays(spec), "f32")
    with pytest.raises(ModelFileError, match=rf"has the KV formats f32, bf16, .* not {kv}\."):
        NativeEngine.open(spec, tensors, SIZES, kv_format=kv, library=cuda)
