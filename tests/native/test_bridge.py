"""The bridge to the native engine: waves in, done records out, on a real event loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.engine.equality import Equality
from kslserve.engine.model import Fill, ModelSpec, PoolSizes, TensorArg
from kslserve.engine.native import NativeEngine, isa_names
from kslserve.engine.types import (
    Done,
    Draft,
    OpKind,
    Row,
    RowKind,
    SlotConfig,
    StateOp,
    TableEdit,
    Wave,
)
from kslserve.errors import EngineError, ModelFileError
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors

POOLS = PoolSizes(
    slots=3, slabs=4, blocks=16, block_tokens=16, blocks_per_slot=4, wave_columns=48, ring_depth=2
)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> tuple[ModelSpec, list[TensorArg]]:
    spec = tiny_spec()
    return spec, tiny_tensors(spec, tiny_arrays(spec, seed=3), "f32")


def open_engine(model: tuple[ModelSpec, list[TensorArg]], **changes: object) -> NativeEngine:
    options: dict[str, object] = {"kv_format": "f32", "threads": 1, "test_hooks": True, **changes}
    return NativeEngine.open(*model, POOLS, **options)  # type: ignore[arg-type]


class Driver:
    """An engine on the running loop, and its done records in order."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.done: list[Done] = []
        self._arrived = asyncio.Event()
        engine.start(self._on_done)

    def _on_done(self, done: Done) -> None:
        self.done.append(done)
        self._arrived.set()

    async def until(self, count: int) -> list[Done]:
        """The first `count` results."""
        while len(self.done) < count:
            self._arrived.clear()
            await asyncio.wait_for(self._arrived.wait(), 60)
        return self.done[:count]

    async def run(self, wave: Wave) -> Done:
        assert self.engine.submit(wave)
        return (await self.until(len(self.done) + 1))[-1]


@pytest.fixture
async def driver(model: tuple[ModelSpec, list[TensorArg]]) -> Iterator[Driver]:
    driver = Driver(open_engine(model))
    yield driver
    driver.engine.close()


def prompt_wave(
    wave_id: int, slot: int = 0, n: int = 7, params: SamplingParams = GREEDY, **row: object
) -> Wave:
    """A whole prompt of n tokens in one row, with everything that a new sequence needs."""
    blocks = list(range(4 * slot, 4 * slot + 4))
    return Wave(
        wave_id,
        rows=[Row(RowKind.LAST, slot, slot, 0, n, np.arange(1, n + 1, dtype=np.int32), **row)],  # type: ignore[arg-type]
        before=[
            StateOp(OpKind.ZERO_SLAB, slot),
            StateOp(OpKind.CONFIGURE, slot, data=SlotConfig(params, seed=5)),
        ],
        edits=[TableEdit(slot, 0, blocks)],
    )


def decode_wave(wave_id: int, start: int, slot: int = 0, token: int = -1, **row: object) -> Wave:
    return Wave(wave_id, rows=[Row(RowKind.LAST, slot, slot, start, 1, [token], **row)])  # type: ignore[arg-type]


async def test_info(driver: Driver) -> None:
    info = driver.engine.info
    assert (info.slots, info.slabs, info.blocks, info.block_tokens) == (3, 4, 16, 16)
    assert (info.blocks_per_slot, info.wave_columns, info.ring_depth) == (4, 48, 2)
    assert info.vocab == 203
    assert info.has_mtp
    assert info.isa in isa_names()
    assert info.equality == Equality()
    assert all(far.bit for far in info.equality.properties().values())
    assert info.slab_bytes > 0
    assert info.block_bytes > 0


async def test_generation_and_known_token(driver: Driver) -> None:
    """A decode row may name the last id or leave it to the slot; both give the same tokens."""
    first = await driver.run(prompt_wave(1))
    assert first.error is None
    assert first.wave == 1
    assert first.started_ns <= first.ended_ns
    assert first.queued_ns <= first.started_ns
    (row,) = first.rows
    assert row.position == 7
    assert len(row.tokens) == 1
    assert row.logprobs is None
    implied = [row.tokens[0]]
    for i in range(5):
        (row,) = (await driver.run(decode_wave(2 + i, 7 + i))).rows
        assert row.position == 8 + i
        implied += row.tokens
    named = list((await driver.run(prompt_wave(7))).rows[0].tokens)
    for i in range(5):
        wave = decode_wave(8 + i, 7 + i, token=named[-1])
        named += (await driver.run(wave)).rows[0].tokens
    assert named == implied


async def test_results_come_in_order_with_two_in_flight(driver: Driver) -> None:
    assert driver.engine.submit(prompt_wave(1))
    assert driver.engine.submit(decode_wave(2, 7))
    assert driver.engine.submit(decode_wave(3, 8)) is False  # the ring is full, nothing is changed
    assert driver.engine.progress().submitted == 2
    done = await driver.until(2)
    assert [d.wave for d in done] == [1, 2]
    third = await driver.run(decode_wave(3, 8))
    assert third.rows[0].position == 9
    progress = driver.engine.progress()
    assert (progress.submitted, progress.started, progress.completed) == (3, 3, 3)
    assert progress.phase == "idle"


async def test_log_probabilities(driver: Driver) -> None:
    done = await driver.run(prompt_wave(1, top_n=4))
    (row,) = done.rows
    assert row.logprobs is not None
    ((chosen, *top),) = row.logprobs
    assert chosen[0] == row.tokens[0]
    assert top[0] == chosen  # greedy
    assert len(top) == 4
    assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)
    assert all(p <= 0 for _, p in top)
    assert isinstance(chosen[0], int)
    assert isinstance(chosen[1], float)


async def test_score_rows_give_every_position(driver: Driver) -> None:
    wave = prompt_wave(1)
    wave.rows[0] = Row(RowKind.SCORE, 0, 0, 0, 4, [1, 2, 3, 4, -1], top_n=0)
    (row,) = (await driver.run(wave)).rows
    assert row.tokens == ()
    assert row.logprobs is not None
    assert [entry[0][0] for entry in row.logprobs] == [2, 3, 4, -1]
    assert row.logprobs[3][0][1] == 0.0


async def test_verify_row_reports_only_what_was_sampled(driver: Driver) -> None:
    """Drafts that cannot all be right: entries beyond the accepted prefix are not reported."""
    await driver.run(prompt_wave(1))
    wave = Wave(2)
    row = Row(RowKind.VERIFY, 0, 0, 7, 4, [1, 198, 198, 198], draft=Draft.GIVEN, top_n=1)
    wave.rows.append(row)
    (result,) = (await driver.run(wave)).rows
    assert len(result.tokens) == result.accepted + 1
    assert result.position == 7 + len(result.tokens)
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.tokens)


async def test_stop_id_latches_the_slot(driver: Driver) -> None:
    token = (await driver.run(prompt_wave(1))).rows[0].tokens[0]
    wave = prompt_wave(2)
    wave.before[1].data.stop_ids = (200, token)
    (row,) = (await driver.run(wave)).rows
    assert row.stop
    assert row.tokens == (token,)
    (row,) = (await driver.run(decode_wave(3, 7))).rows
    assert row.latched
    assert row.tokens == ()


async def test_mask_bias_and_forced_ids(driver: Driver) -> None:
    mask = np.zeros(7, dtype=np.uint32)
    mask[5] = 1 << 3  # id 163 alone
    wave = prompt_wave(1)
    wave.before.append(StateOp(OpKind.MASK, 0, data=mask))
    assert (await driver.run(wave)).rows[0].tokens == (163,)
    params = SamplingParams(temperature=0.0, logit_bias=((17, 100.0), (18, -100.0)))
    assert (await driver.run(prompt_wave(2, params=params))).rows[0].tokens == (17,)
    wave = prompt_wave(3)
    wave.before.append(StateOp(OpKind.FORCE, 0, data=np.array([9, 8], dtype=np.int32)))
    assert (await driver.run(wave)).rows[0].tokens == (9,)
    assert (await driver.run(decode_wave(4, 7))).rows[0].tokens == (8,)


async def test_saved_state_continues_elsewhere(driver: Driver) -> None:
    """SAVE and LOAD write and read the caller's arrays while the wave runs."""
    info = driver.engine.info
    await driver.run(prompt_wave(1))
    expected = (await driver.run(decode_wave(2, 7))).rows[0].tokens
    save = prompt_wave(3)
    slab = np.zeros(info.slab_bytes, dtype=np.uint8)
    block = np.zeros(info.block_bytes, dtype=np.uint8)
    save.after = [
        StateOp(OpKind.SAVE_SLAB, 0, data=slab),
        StateOp(OpKind.SAVE_BLOCK, 0, data=block),
    ]
    token = (await driver.run(save)).rows[0].tokens[0]
    assert slab.any()
    assert block.any()
    load = prompt_wave(4, slot=1)
    load.rows = [Row(RowKind.LAST, 1, 1, 7, 1, [token])]
    load.before[0] = StateOp(OpKind.LOAD_SLAB, 1, data=slab)
    load.before.append(StateOp(OpKind.LOAD_BLOCK, 4, data=block))
    assert (await driver.run(load)).rows[0].tokens == expected


async def test_taps(driver: Driver) -> None:
    wave = prompt_wave(1, n=5)
    wave.taps = ("embed", "logits", "layers.1.mlp_act")
    done = await driver.run(wave)
    assert done.taps["embed"].shape == (5 * 80,)
    assert done.taps["logits"].size % 203 == 0
    assert np.argmax(done.taps["logits"][-203:][:199]) == done.rows[0].tokens[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: setattr(w.rows[0], "slot", 3), "slot"),
        (lambda w: setattr(w.rows[0], "slab", -1), "slab"),
        (lambda w: setattr(w.rows[0], "n", 49), "tokens"),
        (lambda w: setattr(w.rows[0], "tokens", [1, 2]), "tokens"),
        (lambda w: setattr(w.rows[0], "tokens", [1, 2, 3, 4, 5, 6, 203]), "token"),
        (lambda w: setattr(w.rows[0], "tokens", [1, 2, 3, 4, 5, 6, 1 << 40]), "Invalid wave"),
        (lambda w: setattr(w.rows[0], "cuts", ((1, 1),) * 5), "cuts"),
        (lambda w: w.rows.append(w.rows[0]), "slot"),
        (lambda w: setattr(w.edits[0], "ids", [16]), "block"),
        (lambda w: setattr(w.edits[0], "ids", []), "edit"),
        (lambda w: setattr(w.before[0], "a", 4), "slab"),
        (lambda w: setattr(w.before[0], "a", 1 << 40), "Invalid wave"),
        (lambda w: setattr(w.before[1].data, "stop_ids", tuple(range(33))), "stop"),
        (lambda w: setattr(w.before[1].data, "seed", -1), "Invalid wave"),
        (lambda w: w.before.append(StateOp(OpKind.MASK, 0, data=np.zeros(6))), "mask"),
    ],
)
async def test_invalid_wave_changes_nothing(driver: Driver, change: object, text: str) -> None:
    expected = (await driver.run(prompt_wave(1))).rows[0].tokens
    bad = prompt_wave(2)
    change(bad)  # type: ignore[operator]
    with pytest.raises(EngineError, match=text) as caught:
        driver.engine.submit(bad)
    assert str(caught.value).endswith(".")
    assert driver.engine.progress().submitted == 1
    assert (await driver.run(prompt_wave(2))).rows[0].tokens == expected


async def test_large_waves_grow_the_buffers(model: tuple[ModelSpec, list[TensorArg]]) -> None:
    """More ops than the buffers were made for, in one wave."""
    driver = Driver(open_engine(model))
    wave = prompt_wave(1)
    wave.before += [StateOp(OpKind.ZERO_SLAB, 3) for _ in range(100)]
    wave.edits += [TableEdit(2, i % 4, [8 + i % 4]) for i in range(200)]
    expected = (await driver.run(wave)).rows[0].tokens
    assert (await driver.run(prompt_wave(2))).rows[0].tokens == expected
    driver.engine.close()


async def test_close_while_a_wave_runs(model: tuple[ModelSpec, list[TensorArg]]) -> None:
    engine = open_engine(model)
    heard: list[Done] = []
    engine.start(heard.append)
    assert engine.submit(prompt_wave(1, n=40, top_n=3))
    engine.close()
    engine.close()
    assert engine.progress().phase == "closed"
    with pytest.raises(EngineError, match="closed"):
        engine.submit(prompt_wave(2))
    gc.collect()
    await asyncio.sleep(0)
    assert heard == []


async def test_close_inside_a_callback(model: tuple[ModelSpec, list[TensorArg]]) -> None:
    """Results that were drained together are still reported after one of them closed the engine."""
    engine = open_engine(model)
    heard: list[int] = []
    finished = asyncio.get_running_loop().create_future()

    def on_done(done: Done) -> None:
        heard.append(done.wave)
        engine.close()
        if not finished.done():
            finished.set_result(None)

    engine.start(on_done)
    assert engine.submit(prompt_wave(1))
    await asyncio.wait_for(finished, 60)
    assert heard == [1]


async def test_start_twice_is_refused(driver: Driver) -> None:
    with pytest.raises(EngineError):
        driver.engine.start(driver.done.append)


def test_open_refuses_bad_models(model: tuple[ModelSpec, list[TensorArg]]) -> None:
    spec, tensors = model
    with pytest.raises(ModelFileError, match="embed_tokens"):
        open_engine((spec, [t for t in tensors if "embed_tokens" not in t.name]))
    wrong = [
        TensorArg(t.name, t.encoding, t.rows + 1, t.cols, fill=Fill(1, 0, 0.1))
        if t.name == "model.norm.weight"
        else t
        for t in tensors
    ]
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight"):
        open_engine((spec, wrong))
    with pytest.raises(EngineError, match="KV format"):
        open_engine(model, kv_format="q3")
    with pytest.raises(ModelFileError, match=r"q4 takes heads of .* not 24"):
        open_engine(model, kv_format="q4")
    with pytest.raises(EngineError, match="instruction set"):
        open_engine(model, isa="neon")


def test_open_fails_cleanly_without_memory(model: tuple[ModelSpec, list[TensorArg]]) -> None:
    """Every allocation of open may fail; each failure is an error and leaves nothing behind."""
    failures = 0
    while (engine := try_open(model, failures + 1)) is None:
        failures += 1
        assert failures < 1000
    engine.close()
    assert failures > 5


def try_open(model: tuple[ModelSpec, list[TensorArg]], fail_at: int) -> NativeEngine | None:
    """An engine, or None when the n-th allocation was asked for and failed."""
    with contextlib.suppress(EngineError):
        return open_engine(model, fail_alloc_at=fail_at)
    return None


def test_tensor_data_is_not_read_after_open() -> None:
    spec = tiny_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec, seed=3), "f32")

    async def first(tensors: list[TensorArg], spoil: bool) -> tuple[int, ...]:
        engine = open_engine((spec, tensors))
        if spoil:
            for tensor in tensors:
                np.asarray(tensor.data)[...] = 0
        driver = Driver(engine)
        tokens = (await driver.run(prompt_wave(1))).rows[0].tokens
        engine.close()
        return tokens

    expected = asyncio.run(first(tensors, spoil=False))
    assert asyncio.run(first(tensors, spoil=True)) == expected
