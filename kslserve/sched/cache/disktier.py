"""Checkpoints in files: which ones are there, are written, read and removed.

Files are touched by one disk thread alone, and by a helper that it waits for while it reads a large
one; results come back on the event loop. A file is written from a host copy and read into one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kslserve import log
from kslserve.engine.types import EngineInfo
from kslserve.sched.cache.checkpoint import Checkpoint
from kslserve.sched.cache.diskstore import HEAD_BYTES, BadFile, DiskCopy, DiskStore, Scan
from kslserve.sched.cache.hosttier import HostBlock, HostCopy, HostTier
from kslserve.sched.cache.index import RadixIndex
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.cache.value import durable_value, lasting

WRITE_ERRORS_MAX = 3  # after these nothing is written any more
WRITES_MAX = 2  # checkpoints in the hands of the disk thread at once

_log = log.get("cache")


class Runner(Protocol):
    """Runs blocking work, one piece after the other, and reports on the event loop."""

    def run(
        self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None]
    ) -> None: ...


class Reader(Protocol):
    """Somebody who waits for a checkpoint to be read. pinned: set once it is in host memory."""

    pinned: HostCopy | None


class Disk:
    """What a disk tier is made of. budget: bytes of all files in the folder."""

    __slots__ = ("budget", "runner", "store")

    def __init__(self, store: DiskStore, runner: Runner, budget: int) -> None:
        self.store = store
        self.runner = runner
        self.budget = budget


class DiskTier:
    """now: the count of admissions. lost: called for a checkpoint that may have no copy left.
    settled: called when a file was written or read, or could not be.

    used: bytes of all files. files: of ours. foreign: of others, oldest last."""

    def __init__(
        self,
        disk: Disk,
        policy: CachePolicy,
        info: EngineInfo,
        index: RadixIndex,
        host: HostTier,
        now: Callable[[], int],
        lost: Callable[[Checkpoint], None],
        settled: Callable[[], None],
    ) -> None:
        self.used = 0
        self.files = 0
        self.foreign: list[DiskCopy] = []
        self.reads = self.writes = self.bad_files = self.write_errors = 0
        self._disk = disk
        self._policy = policy
        self._info = info
        self._index = index
        self._host = host
        self._now = now
        self._lost = lost
        self._settled = settled
        self._writing: set[Checkpoint] = set()
        self._reading: dict[Checkpoint, list[Reader]] = {}
        self._next: deque[Checkpoint] = deque()  # of those, what has no room in memory yet

    @property
    def busy(self) -> bool:
        """Something is being written."""
        return bool(self._writing)

    @property
    def full(self) -> bool:
        """No more can be given to the disk thread now."""
        return len(self._writing) >= WRITES_MAX

    @property
    def waiting(self) -> bool:
        """Something is to be read as soon as there is room in host memory."""
        return bool(self._next)

    def restore(self, scan: Scan) -> None:
        """Make known what is on disk from earlier."""
        self.foreign = sorted(scan.foreign, key=lambda c: -c.used)
        self.used = sum(copy.nbytes for copy in scan.foreign)
        for found in sorted(scan.found, key=lambda f: f.copy.used):
            node = self._index.insert(found.tokens)
            self._index.hold(node)
            if node.checkpoint is None:
                checkpoint = Checkpoint(node, found.kind, self._now())
                checkpoint.disk = found.copy
                self._index.attach(node, checkpoint)
                self.used += found.copy.nbytes
                self.files += 1
            self._index.release(node)
        self.bad_files += scan.bad
        _log.info(
            "checkpoints on disk", found=len(scan.found), other_models=len(scan.foreign),
            ignored=scan.bad, bytes=self.used,
        )  # fmt: skip
        self._keep_budget()

    # ------------------------------------------------------------ writing

    def wants(self, checkpoint: Checkpoint) -> bool:
        """Whether it should be written."""
        if checkpoint.disk is not None or checkpoint in self._writing:
            return False
        if self.write_errors >= WRITE_ERRORS_MAX or not lasting(checkpoint):
            return False
        return checkpoint.position >= self._policy.disk_min_tokens and self._fits(checkpoint)

    def _fits(self, checkpoint: Checkpoint) -> bool:
        """Whether there is room for its file, or files that are worth less."""
        budget = self._disk.budget
        nbytes = self._image_bytes(checkpoint) + 4 * checkpoint.position + HEAD_BYTES
        if nbytes > budget:
            return False
        free = budget - self.used + sum(copy.nbytes for copy in self.foreign)
        if nbytes <= free:
            return True
        worth = self._value(checkpoint)
        own = (c for c in self._index.checkpoints() if self._value(c) < worth)
        less = [c.disk for c in own if c.disk is not None]
        return nbytes <= free + sum(copy.nbytes for copy in less)

    def write(self, checkpoint: Checkpoint) -> None:
        """Begin to write a checkpoint that has a host copy."""
        copy, store = checkpoint.host, self._disk.store
        assert copy is not None
        if checkpoint in self._writing:
            return
        self._writing.add(checkpoint)
        copy.pins += 1
        tokens = checkpoint.node.ids()
        kind, slab, blocks = checkpoint.kind, copy.slab, [b.data for b in copy.blocks]
        self._disk.runner.run(
            lambda: store.write(tokens, kind, slab, blocks),
            lambda written, e: self._written(checkpoint, copy, written, e),
        )

    def _written(
        self, checkpoint: Checkpoint, copy: HostCopy, written: DiskCopy, error: Exception | None
    ) -> None:
        self._writing.discard(checkpoint)
        copy.pins -= 1
        if error is not None:
            _log.error("a checkpoint could not be written", error=repr(error))
            self.write_errors += 1
            if not self._host.budget and not copy.pins and checkpoint.host is copy:
                self._host.remove(checkpoint)
                self._lost(checkpoint)
        else:
            self.writes += 1
            checkpoint.disk = written
            self.used += written.nbytes
            self.files += 1
            self._keep_budget()
        self._settled()

    # ------------------------------------------------------------ reading

    def read(self, checkpoint: Checkpoint, reader: Reader) -> None:
        """Bring a checkpoint to host memory for a reader."""
        readers = self._reading.get(checkpoint)
        if readers is not None:
            if reader not in readers:
                readers.append(reader)
            return
        self._reading[checkpoint] = [reader]
        self._next.append(checkpoint)
        self.begin_reads()

    def begin_reads(self) -> None:
        """Read what there is room for, in order."""
        host = self._host
        while self._next:
            checkpoint = self._next[0]
            copy, store = checkpoint.disk, self._disk.store
            assert copy is not None
            nbytes = self._image_bytes(checkpoint)
            if self._reading[checkpoint]:
                if not host.has_way(nbytes):
                    return
                host.coming += nbytes
                self._begin(checkpoint, copy, store, nbytes)
            else:
                del self._reading[checkpoint]
            self._next.popleft()

    def _image_bytes(self, checkpoint: Checkpoint) -> int:
        info = self._info
        return info.slab_bytes + -(-checkpoint.position // info.block_tokens) * info.block_bytes

    def _begin(self, checkpoint: Checkpoint, copy: DiskCopy, store: DiskStore, nbytes: int) -> None:
        tokens, take = checkpoint.node.ids(), self._host.images.take
        self._disk.runner.run(
            lambda: store.read(copy, tokens, take),
            lambda images, e: self._read(checkpoint, nbytes, images, e),
        )

    def forget(self, reader: Reader) -> None:
        """A reader waits no more."""
        for readers in self._reading.values():
            if reader in readers:
                readers.remove(reader)

    def _read(
        self, checkpoint: Checkpoint, nbytes: int, images: Any, error: Exception | None
    ) -> None:
        readers = self._reading.pop(checkpoint)
        self._host.coming -= nbytes
        if error is not None:
            if not isinstance(error, (BadFile, OSError)):
                raise error
            self.bad_files += 1
            _log.warning("a checkpoint on disk is not usable", error=str(error))
            if checkpoint.disk is not None:
                self._remove(checkpoint)
        else:
            self.reads += 1
            if checkpoint.host is None and checkpoint.stored:
                slab, blocks = images
                full = checkpoint.position // self._info.block_tokens
                known = self._host.shared(checkpoint.node)[:full]
                made = known + [HostBlock(image) for image in blocks[len(known) :]]
                self._host.add(checkpoint, HostCopy(slab, made))
            if checkpoint.host is not None:
                for reader in readers:
                    reader.pinned = checkpoint.host
                    reader.pinned.pins += 1
        self._settled()

    # ------------------------------------------------------------ removing

    def _keep_budget(self) -> None:
        """Remove files, those of others first, oldest first, then the ones worth least."""
        budget = self._disk.budget
        while self.used > budget and self.foreign:
            copy = self.foreign.pop()
            self.used -= copy.nbytes
            self._unlink(copy)
        while self.used > budget:
            own = [c for c in self._index.checkpoints() if c.disk and c not in self._reading]
            victim = min(own, key=self._value, default=None)
            if victim is None:
                return
            self._remove(victim)

    def _remove(self, checkpoint: Checkpoint) -> None:
        copy, checkpoint.disk = checkpoint.disk, None
        assert copy is not None
        self.used -= copy.nbytes
        self.files -= 1
        self._unlink(copy)
        self._lost(checkpoint)

    def _unlink(self, copy: DiskCopy) -> None:
        store = self._disk.store
        self._disk.runner.run(lambda: store.remove(copy), _ignore)

    def _value(self, checkpoint: Checkpoint) -> float:
        return durable_value(checkpoint, self._now())


def _ignore(result: Any, error: Exception | None) -> None:
    if error is not None:
        _log.warning("a checkpoint file could not be removed", error=repr(error))
