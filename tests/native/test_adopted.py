"""What starts from a checkpoint equals what was computed from the beginning, bit for bit: every
kind of save point, every tier, every KV format, greedy and sampled, MTP drafts included."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.budget import KV_FORMATS
from kslserve.engine.model import ModelSpec, PoolSizes, TensorArg
from kslserve.engine.native import CPU_LIBRARY, NativeEngine
from kslserve.engine.types import Done, Draft, Ids, OpKind, RowKind, Wave
from kslserve.metrics import Metrics
from kslserve.sched.cache.checkpoint import Checkpoint, Kind
from kslserve.sched.cache.diskstore import NO_HEAD, DiskStore, StateSizes
from kslserve.sched.cache.diskthread import DiskThread
from kslserve.sched.cache.disktier import Disk
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.scheduler import Job, SchedLimits, Scheduler
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors, wide_spec
from tests.world import Recorder

POOLS = PoolSizes(
    slots=3, slabs=24, blocks=90, block_tokens=16, blocks_per_slot=10, wave_columns=40,
    ring_depth=1, kv_ring=64,
)  # fmt: skip
POLICY = CachePolicy(min_tokens=4, gap=3, interval=40, host_bytes=0, disk_min_tokens=4)
LIMITS = SchedLimits(3, 16, 32, 1e6, 1e6, 0.0, 0.0, 160)
GREEDY = SamplingParams(temperature=0.0)
HOT = SamplingParams(
    temperature=1.0, top_k=40, repetition_penalty=1.2, presence_penalty=0.4, logprobs=2
)
PENALTIES = SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=1.5)
DRAFTS = 3

Model = tuple[ModelSpec, list[TensorArg], str, Any]  # with the KV format and the library
each_sampling = pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])


def model_of(spec: ModelSpec, kv: str, library: Any) -> Model:
    return spec, tiny_tensors(spec, tiny_arrays(spec, seed=3), "mixed"), kv, library


@pytest.fixture(scope="module", params=KV_FORMATS)
def model(request: pytest.FixtureRequest) -> Model:
    spec = tiny_spec() if request.param == "f32" else wide_spec()
    return model_of(spec, request.param, CPU_LIBRARY)


class Drafting:
    """An engine whose decode rows verify the MTP drafts of the row before, wherever the blocks
    suffice. drafts: the embeddings of the ids of each such row, drafts included."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._covered = [0] * POOLS.slots
        self._proposed = [0] * POOLS.slots
        self.drafts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def start(self, on_done: Callable[[Done], None]) -> None:
        def spy(done: Done) -> None:
            if "embed" in done.taps:
                self.drafts.append(done.taps["embed"].tobytes())
            for row in done.rows:
                self._proposed[row.slot] = len(row.drafts)
            on_done(done)

        self._engine.start(spy)

    def submit(self, wave: Wave) -> bool:
        for edit in wave.edits:
            self._covered[edit.slot] = (edit.start + len(edit.ids)) * POOLS.block_tokens
        for op in wave.before:
            if op.kind is OpKind.CONFIGURE:
                self._proposed[op.a] = 0
        rows, taps = [], ()
        for row in wave.rows:
            if row.kind is RowKind.LAST:
                room = self._covered[row.slot] - row.start - row.n
                if row.n == 1 and self._proposed[row.slot] and room >= 2 * DRAFTS:
                    row = replace(row, kind=RowKind.VERIFY, draft=Draft.OWN, n=1 + DRAFTS)
                    taps = ("embed",)
                row = replace(row, propose=DRAFTS if room >= 2 * DRAFTS else 0)
            rows.append(row)
        return self._engine.submit(replace(wave, rows=rows, taps=taps))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    while not condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0)


@dataclass
class Rig:
    engine: Drafting
    scheduler: Scheduler
    tasks: list[Any] = field(default_factory=list)

    async def run(
        self, ids: Ids, sampling: SamplingParams, boundaries: tuple[int, ...] = (), new: int = 24
    ) -> Recorder:
        ended = asyncio.Event()
        recorder = Recorder(lambda event, _: ended.set() if event == "ended" else None)
        job = Job(ids, new, sampling, 5, boundaries=boundaries)
        recorder.sequence = self.scheduler.submit(job, recorder)
        await ended.wait()
        self.scheduler.check()
        assert recorder.error is None
        return recorder

    async def settle(self) -> None:
        """Wait until nothing moves between tiers."""
        tiers = self.scheduler.cache.tiers
        await until(lambda: not (tiers.busy or self.scheduler.snapshot().in_flight))
        self.scheduler.check()

    def checkpoints(self) -> list[Checkpoint]:
        found = self.scheduler.cache.index.checkpoints()
        return sorted(found, key=lambda c: c.position)


@asynccontextmanager
async def rig(
    model: Model, policy: CachePolicy | None = POLICY, folder: Path | None = None, seqs: int = 3
) -> AsyncIterator[Rig]:
    spec, tensors, kv, library = model
    native = NativeEngine.open(spec, tensors, POOLS, kv_format=kv, threads=1, library=library)
    engine, thread = Drafting(native) if spec.mtp_layers else native, DiskThread()
    scheduler = Scheduler(engine, replace(LIMITS, max_seqs=seqs, cache=policy), Metrics())
    if folder is not None:
        info = native.info
        head = b"h" * 32 if spec.mtp_layers else NO_HEAD
        sizes = StateSizes(b"f" * 32, info.slab_bytes, info.block_bytes, info.block_tokens, head)
        store = DiskStore(str(folder), sizes)
        scheduler.use_disk(Disk(store, thread, 1 << 30), store.scan())
    scheduler.start()
    yield Rig(cast(Drafting, engine), scheduler)
    await scheduler.drain(60)
    scheduler.check()
    await scheduler.flush(60)
    scheduler.cache.clear()
    scheduler.check()
    snapshot = scheduler.snapshot()
    assert snapshot.blocks_free == snapshot.blocks_total
    scheduler.close()
    thread.close()
    native.close()


def tokens(n: int, seed: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 190, n, dtype=np.int32)


PROMPT = tokens(107, 1)
BOUNDARIES = (21, 64, 100)
AT = {21: Kind.SYSTEM, 40: Kind.INTERVAL, 64: Kind.SYSTEM, 80: Kind.INTERVAL, 100: Kind.STABLE}


class Cold:
    """Answers of a scheduler without a cache, made once."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[tuple[bytes, SamplingParams], tuple[Recorder, list[bytes]]] = {}

    async def __call__(self, ids: Ids, sampling: SamplingParams) -> tuple[Recorder, list[bytes]]:
        key = ids.tobytes(), sampling
        if key not in self._known:
            async with rig(self._model, None) as cold:
                recorder = await cold.run(ids, sampling)
                self._known[key] = recorder, cold.engine.drafts
        return self._known[key]

    async def expect_first(self, warm: Rig, sampling: SamplingParams) -> Recorder:
        """The first prompt, with its boundaries; nothing is known of it."""
        expected, _ = await self(PROMPT, sampling)
        got = await warm.run(PROMPT, sampling, BOUNDARIES)
        assert (got.cached_tokens, got.ids) == (0, expected.ids)
        return got

    async def expect(self, warm: Rig, ids: Ids, sampling: SamplingParams, cached: int) -> None:
        """The same ids from a checkpoint: tokens, log-probabilities and drafts are equal."""
        expected, drafts = await self(ids, sampling)
        warm.engine.drafts.clear()
        got = await warm.run(ids, sampling)
        assert got.cached_tokens == cached
        assert got.ids == expected.ids
        assert got.logprobs == expected.logprobs
        assert drafts
        assert warm.engine.drafts == drafts


@pytest.fixture(scope="module")
def cold(model: Model) -> Cold:
    return Cold(model)


def branches(position: int) -> list[Ids]:
    """Two prompts that follow the prompt up to a position and then differ at once."""
    other = np.array([(PROMPT[position] + 1) % 190, (PROMPT[position] + 2) % 190], np.int32)
    return [np.concatenate([PROMPT[:position], other[i : i + 1], tokens(6, 9 + i)]) for i in (0, 1)]


@each_sampling
async def test_every_save_point_of_a_prompt(
    model: Model, cold: Cold, sampling: SamplingParams
) -> None:
    async with rig(model) as warm:
        await cold.expect_first(warm, sampling)
        saved = {c.position: c.kind for c in warm.checkpoints()}
        assert saved.items() >= AT.items()
        for position in AT:
            for ids in branches(position):
                await cold.expect(warm, ids, sampling, position)
        # A repeated prompt starts at its stable boundary, or later.
        await cold.expect(warm, PROMPT, sampling, 100)


@each_sampling
async def test_a_junction_is_found_the_second_time(
    model: Model, cold: Cold, sampling: SamplingParams
) -> None:
    async with rig(model) as warm:
        await cold.expect_first(warm, sampling)
        first, second = branches(55)
        await cold.expect(warm, first, sampling, 40)
        await cold.expect(warm, second, sampling, 55)


@each_sampling
async def test_the_end_of_a_generation(model: Model, cold: Cold, sampling: SamplingParams) -> None:
    async with rig(model) as warm:
        first = await cold.expect_first(warm, sampling)
        turn = np.concatenate([PROMPT, np.array(first.ids, np.int32)])
        for seed in (1, 2):
            ids = np.concatenate([turn, tokens(9, seed)])
            await cold.expect(warm, ids, sampling, len(turn) - 1)


@each_sampling
async def test_a_cancelled_prompt_keeps_what_it_computed(
    model: Model, cold: Cold, sampling: SamplingParams
) -> None:
    async with rig(model, replace(POLICY, interval=1000)) as warm:
        recorder = Recorder()
        job = Job(PROMPT, 4, sampling, 5)
        sequence = recorder.sequence = warm.scheduler.submit(job, recorder)
        await until(lambda: sequence.computed >= 33)
        warm.scheduler.cancel(sequence)
        await until(lambda: recorder.reason is not None)
        assert recorder.reason is FinishReason.CANCELLED
        (kept,) = warm.checkpoints()
        assert 33 <= kept.position < 107
        await cold.expect(warm, PROMPT, sampling, kept.position)


@pytest.mark.parametrize("sampling", [GREEDY, HOT, PENALTIES])
async def test_one_that_gave_way_goes_on_as_if_nothing_was(
    model: Model, cold: Cold, sampling: SamplingParams
) -> None:
    """Penalties, noise and drafts included."""
    expected, _ = await cold(PROMPT, sampling)
    async with rig(model, seqs=1) as warm:
        low = Recorder()
        low.sequence = warm.scheduler.submit(Job(PROMPT, 24, sampling, 5, priority=1), low)
        await until(lambda: len(low.ids) >= 8)
        assert low.reason is None
        await warm.run(tokens(20, 3), sampling, new=2)
        assert warm.scheduler.snapshot().preemptions == 1
        await until(lambda: low.reason is not None)
        assert low.ids[:24] == expected.ids[:24]
        assert low.logprobs == expected.logprobs[: len(low.logprobs)]


@each_sampling
async def test_six_that_share_a_beginning(
    model: Model, cold: Cold, sampling: SamplingParams
) -> None:
    """They arrive together; what they share is computed once."""
    async with rig(model, replace(POLICY, interval=1000)) as warm:
        many = [np.concatenate([PROMPT[:90], tokens(5, seed)]) for seed in range(6)]
        got = await asyncio.gather(*(warm.run(ids, sampling, new=8) for ids in many))
        assert [r.cached_tokens for r in got] == [0, 90, 90, 90, 90, 90]
        for ids, recorder in zip(many, got, strict=True):
            expected, _ = await cold(ids, sampling)
            assert recorder.ids[:8] == expected.ids[:8]


@each_sampling
async def test_from_host_memory(model: Model, cold: Cold, sampling: SamplingParams) -> None:
    policy = replace(POLICY, host_bytes=1 << 30, move_bytes=1)  # one op a wave
    async with rig(model, policy) as warm:
        await cold.expect_first(warm, sampling)
        # Two adopters make a lasting checkpoint of each; copies below follow in idle waves.
        for position in (64, 100):
            for ids in branches(position):
                await cold.expect(warm, ids, sampling, position)
        await warm.settle()
        on_host = [c for c in warm.checkpoints() if c.host is not None]
        assert {64, 100} <= {c.position for c in on_host}
        for position in (64, 100):
            for ids in branches(position):
                cache = warm.scheduler.cache
                for checkpoint in warm.checkpoints():
                    if checkpoint.device is not None:
                        cache.device.evict(checkpoint)
                deepest = max(c.position for c in cache.match(ids).found if c.position < len(ids))
                assert deepest >= position
                await cold.expect(warm, ids, sampling, deepest)


@each_sampling
async def test_from_disk_after_a_restart(
    model: Model, cold: Cold, sampling: SamplingParams, tmp_path: Path
) -> None:
    async with rig(model, folder=tmp_path) as warm:
        first = await cold.expect_first(warm, sampling)
    turn = np.concatenate([PROMPT, np.array(first.ids, np.int32)])
    async with rig(model, folder=tmp_path) as warm:
        assert {21, 64, len(turn) - 1} <= {c.position for c in warm.checkpoints()}
        assert all(c.device is None for c in warm.checkpoints())
        for ids in branches(64):
            await cold.expect(warm, ids, sampling, 64)
        ids = np.concatenate([turn, tokens(9, 1)])
        await cold.expect(warm, ids, sampling, len(turn) - 1)
        assert warm.scheduler.cache.tiers.disk.reads


@each_sampling
async def test_from_files_of_an_engine_with_a_head(
    model: Model, cold: Cold, sampling: SamplingParams, tmp_path: Path
) -> None:
    """One without it has the same trunk, and answers as it does from the beginning."""
    async with rig(model, folder=tmp_path) as warm:
        await cold.expect_first(warm, sampling)
    spec, tensors, *rest = model
    trunk = [t for t in tensors if not t.name.startswith("mtp.")]
    plain: Model = (replace(spec, mtp_layers=0), trunk, *rest)
    ids = branches(64)[0]
    async with rig(plain, None) as other:
        expected = await other.run(ids, sampling)
    async with rig(plain, folder=tmp_path) as other:
        got = await other.run(ids, sampling)
        assert other.scheduler.cache.tiers.disk.reads
    assert (got.cached_tokens, got.ids, got.logprobs) == (64, expected.ids, expected.logprobs)


def damage(folder: Path) -> None:
    """Change the last byte of every file."""
    for path in folder.iterdir():
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)


async def test_damaged_files_cost_a_prefill_only(model: Model, cold: Cold, tmp_path: Path) -> None:
    async with rig(model, folder=tmp_path) as warm:
        await cold.expect_first(warm, GREEDY)
    damage(tmp_path)
    async with rig(model, folder=tmp_path) as warm:
        assert warm.checkpoints()
        await cold.expect(warm, branches(64)[0], GREEDY, 0)
        assert warm.scheduler.cache.tiers.disk.bad_files
