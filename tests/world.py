"""A scheduler on a fake engine in virtual time, and sinks that write down what they hear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.fake import FakeEngine, Faults, VirtualClock
from kslserve.engine.model import PoolSizes
from kslserve.engine.types import Ids
from kslserve.errors import KslError
from kslserve.metrics import Metrics
from kslserve.sched.cache.checkpoint import Kind
from kslserve.sched.cache.diskstore import DiskCopy, DiskStore, Found, Scan, Take
from kslserve.sched.cache.disktier import Disk
from kslserve.sched.cache.images import Image
from kslserve.sched.scheduler import Job, SchedLimits, Scheduler, Sequence

SIZES = PoolSizes(
    slots=4, slabs=4, blocks=40, block_tokens=16, blocks_per_slot=16, wave_columns=64, ring_depth=1
)


class Recorder:
    """A sink. hook: called with (event name, recorder) after each event; may raise, cancel,
    submit."""

    def __init__(self, hook: Callable[[str, Recorder], None] | None = None) -> None:
        self.hook = hook
        self.sequence: Sequence | None = None
        self.ids: list[int] = []
        self.batches: list[int] = []
        self.logprobs: list[list[tuple[int, float]]] = []
        self.admitted_count = 0
        self.cached_tokens = 0
        self.reason: FinishReason | None = None
        self.error: KslError | None = None

    def admitted(self, cached_tokens: int) -> None:
        assert self.admitted_count == 0
        assert self.reason is None
        self.admitted_count += 1
        self.cached_tokens = cached_tokens
        self._call("admitted")

    def tokens(self, ids: list[int], logprobs: list[list[tuple[int, float]]] | None) -> None:
        assert self.admitted_count == 1
        assert self.reason is None
        assert ids
        self.ids += ids
        self.batches.append(len(ids))
        if logprobs is not None:
            assert len(logprobs) == len(ids)
            self.logprobs += logprobs
        self._call("tokens")

    def ended(self, reason: FinishReason, error: KslError | None) -> None:
        assert self.reason is None, "ended twice"
        self.reason, self.error = reason, error
        self._call("ended")

    def _call(self, event: str) -> None:
        if self.hook is not None:
            self.hook(event, self)


class MemoryStore:
    """A DiskStore without a disk. broken: names of methods that raise OSError."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[Ids, Kind, Image, list[Image]]] = {}
        self.broken: set[str] = set()

    def scan(self) -> Scan:
        found = [
            Found(self._copy(name), kind, tokens)
            for name, (tokens, kind, _, _) in self.files.items()
        ]
        return Scan(found, [], 0)

    def write(self, tokens: Ids, kind: Kind, slab: Image, blocks: list[Image]) -> DiskCopy:
        if "write" in self.broken:
            raise OSError("no space")
        name = tokens.tobytes().hex()
        self.files[name] = tokens.copy(), kind, slab.copy(), [b.copy() for b in blocks]
        return self._copy(name)

    def read(self, copy: DiskCopy, tokens: Ids, take: Take) -> tuple[Image, list[Image]]:
        if "read" in self.broken:
            raise OSError("bad sector")
        found, _, slab, blocks = self.files[copy.path.name]
        assert np.array_equal(found, tokens)
        images = take(slab.nbytes, 1) + [take(b.nbytes, 1)[0] for b in blocks]
        for image, stored in zip(images, [slab, *blocks], strict=True):
            image[:] = stored
        return images[0], images[1:]

    def remove(self, copy: DiskCopy) -> None:
        self.files.pop(copy.path.name, None)

    def _copy(self, name: str) -> DiskCopy:
        _, _, slab, blocks = self.files[name]
        return DiskCopy(Path(name), slab.nbytes + sum(b.nbytes for b in blocks), 0.0)


class VirtualDisk:
    """Work takes 10 ms of virtual time, one piece after the other."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._free_at = 0.0

    def run(self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None]) -> None:
        def body() -> None:
            try:
                result = work()
            except OSError as error:
                done(None, error)
            else:
                done(result, None)

        self._free_at = max(self._free_at, self._clock.now()) + 0.01
        self._clock.call_later(self._free_at - self._clock.now(), body)


@dataclass
class World:
    """sizes, limits: overridable; engine options go to FakeEngine. store: of a disk tier."""

    sizes: PoolSizes = SIZES
    limits: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    store: MemoryStore | None = None
    disk_bytes: int = 1 << 40

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.faults = Faults()
        options = {"wave_s": 0.005, "column_s": 0.0005, "faults": self.faults, **self.options}
        self.engine = FakeEngine(self.sizes, clock=self.clock, **options)
        self.metrics = Metrics()
        self.fatal: list[str] = []
        limits = {
            "max_seqs": self.sizes.slots,
            "max_queue": 64,
            "wave_columns": 48,
            "wave_target_ms": 50.0,
            "decode_gap_ms": 250.0,
            "queue_timeout_s": 0.0,
            "request_timeout_s": 0.0,
            "context": 256,
            **self.limits,
        }
        self.scheduler = Scheduler(
            self.engine,
            SchedLimits(**limits),
            self.metrics,
            clock=self.clock.now,
            call_later=self.clock.call_later,
            on_fatal=self.fatal.append,
        )
        if self.store is not None:
            disk = Disk(cast(DiskStore, self.store), VirtualDisk(self.clock), self.disk_bytes)
            self.scheduler.use_disk(disk, self.store.scan())
        self.scheduler.start()

    def submit(self, new: Job, hook: Callable[[str, Recorder], None] | None = None) -> Recorder:
        recorder = Recorder(hook)
        recorder.sequence = self.scheduler.submit(new, recorder)
        return recorder

    def cancel(self, recorder: Recorder, error: KslError | None = None) -> None:
        assert recorder.sequence is not None
        self.scheduler.cancel(recorder.sequence, error)

    def run(self, until: float = float("inf")) -> None:
        """Run to a time or to the end, checking conservation after every callback."""
        while self.clock.step(until):
            self.scheduler.check()

    def check_all_free(self) -> None:
        """Nothing is held but by the cache, and nothing at all once that is cleared; nothing is
        queued or in flight."""
        self.scheduler.check()
        self.scheduler.cache.clear()
        self.scheduler.check()
        snapshot = self.scheduler.snapshot()
        assert self.scheduler.idle
        assert snapshot.blocks_free == snapshot.blocks_total
        assert (snapshot.queued, snapshot.running, snapshot.in_flight) == (0, 0, False)


def job(prompt: int = 5, new: int = 4, *, seed: int = 0, **changes: Any) -> Job:
    """A job of `prompt` tokens that follow from the seed. Stops at nothing unless told."""
    ids = np.random.default_rng(seed + 1000 * prompt).integers(0, 512, prompt, dtype=np.int32)
    sampling = changes.pop("sampling", SamplingParams())
    return Job(ids, new, sampling, seed, **changes)


def alone(new: Job, sizes: PoolSizes = SIZES) -> Recorder:
    """The same job with the engine to itself."""
    world = World(sizes)
    recorder = world.submit(new)
    world.run()
    return recorder
