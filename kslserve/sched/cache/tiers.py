"""Tiers: copies of checkpoints below the device, in host memory and in files.

Everything here happens beside the waves. Device to host and back are ops that ride in waves, a
bounded part in each; files are read and written by one disk thread, whose results come back on the
event loop. What is copied down stays usable above meanwhile; what is evicted above before its copy
is complete is lost, which costs a prefill and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from typing import Any, Protocol

import numpy as np

from kslserve import log
from kslserve.engine.types import EngineInfo, StateOp
from kslserve.sched.cache import moves
from kslserve.sched.cache.checkpoint import Checkpoint
from kslserve.sched.cache.diskstore import HEAD_BYTES, BadFile, DiskCopy, DiskStore, Scan
from kslserve.sched.cache.hosttier import HostBlock, HostCopy, HostTier
from kslserve.sched.cache.index import RadixIndex
from kslserve.sched.cache.moves import Transfer
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.cache.value import durable_value, lasting, value

AT_RISK = 3  # checkpoints on the device that may be the next to go
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
    """The disk tier's parts. budget: bytes of all files in the folder."""

    __slots__ = ("budget", "foreign", "runner", "store", "used")

    def __init__(self, store: DiskStore, runner: Runner, budget: int) -> None:
        self.store = store
        self.runner = runner
        self.budget = budget
        self.used = 0
        self.foreign: list[DiskCopy] = []  # oldest last


class Tiers:
    """on_device: the cache's checkpoints on the device. now: the count of admissions.
    under_pressure: slabs or blocks are short. drop: called for a checkpoint that has no copy left.
    on_change: called when a file was read or written."""

    def __init__(
        self,
        policy: CachePolicy,
        info: EngineInfo,
        index: RadixIndex,
        on_device: dict[Checkpoint, None],
        now: Callable[[], int],
        under_pressure: Callable[[], bool],
        drop: Callable[[Checkpoint], None],
    ) -> None:
        self.host = HostTier(policy.host_bytes, info.block_tokens)
        self.disk: Disk | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.flushing = False
        self.dirty = False  # something changed since nothing was found worth copying
        self.active: Transfer | None = None  # to host
        self.reads = self.writes = self.bad_files = self.write_errors = 0
        self.files = 0  # of ours
        self._policy = policy
        self._info = info
        self._index = index
        self._on_device = on_device
        self._now = now
        self._under_pressure = under_pressure
        self._drop = drop
        self._writing: set[Checkpoint] = set()
        self._reading: dict[Checkpoint, list[Reader]] = {}

    @property
    def enabled(self) -> bool:
        return self.disk is not None or self.host.budget > 0

    @property
    def busy(self) -> bool:
        """Something is on its way down."""
        return self.active is not None or bool(self._writing)

    @property
    def ready(self) -> bool:
        """The next wave should carry ops of ours."""
        return self.active is not None and self.active.ready

    # ------------------------------------------------------------ device to host

    def start_save(self) -> None:
        """Begin to copy down what is worth it, if nothing is on its way."""
        if self.active is not None or not self.dirty or len(self._writing) >= WRITES_MAX:
            return
        wanted = self._wanted() if self.enabled else []
        if not wanted:
            self.dirty = False
            return
        checkpoint = max(wanted, key=self._durable_value)
        assert checkpoint.device is not None
        info = self._info
        known = self.host.shared(checkpoint.node)[: checkpoint.position // info.block_tokens]
        images = [
            np.empty(info.block_bytes, np.uint8)
            for _ in range(len(checkpoint.device.blocks) - len(known))
        ]
        slab = np.empty(info.slab_bytes, np.uint8)
        self.active = moves.save(checkpoint, slab, known, images)
        checkpoint.moving = True
        checkpoint.tried = self._now()

    def take_ops(self) -> list[StateOp]:
        """Ops for the wave that is planned. They come before everything else in it, so that they
        see memory that the same wave gives to others."""
        return self.active.take(self._policy.move_bytes) if self.active is not None else []

    def unplan(self) -> None:
        active = self.active
        if active is not None:
            active.unplan()
            if active.checkpoint.device is None:
                self._end_save(None)

    def sent(self) -> None:
        if self.active is not None:
            self.active.sent()

    def complete(self) -> None:
        """The wave in flight completed."""
        active = self.active
        if active is not None and active.all_sent:
            self._end_save(active.copy)
        self.start_save()

    def evicted(self, checkpoint: Checkpoint) -> None:
        """Its memory on the device will be reused."""
        active = self.active
        if active is not None and active.checkpoint is checkpoint and active.ready:
            self._end_save(None)

    def refused(self) -> bool:
        """The engine refused a wave; True if it carried ops of ours, which are given up."""
        active = self.active
        if active is None or not active.planned:
            return False
        self._end_save(None)
        return True

    def _end_save(self, copy: HostCopy | None) -> None:
        assert self.active is not None
        checkpoint, self.active = self.active.checkpoint, None
        checkpoint.moving = False
        if copy is None or checkpoint.host is not None:
            self._drop_if_lost(checkpoint)
            return
        self.host.add(checkpoint, copy)
        if self.flushing or not self.host.budget:
            self._write(checkpoint)
        self._trim()

    def _wanted(self) -> list[Checkpoint]:
        """Checkpoints on the device that should be copied down now: when flushing, all for the
        disk; else what the host tier has room for, and for the disk those that are next to be
        evicted, so that what is superseded within a turn or two is never written."""
        fresh = [c for c in self._on_device if c.host is None and not c.moving and lasting(c)]
        if self.flushing:
            return [c for c in fresh if self._should_write(c)]
        # What was dropped right after it was copied would be again.
        fresh = [c for c in fresh if c.tried != self._now()]
        wanted = [c for c in fresh if self._fits(c)]
        if not wanted and self.disk is not None and fresh and self._under_pressure():
            at_risk = nsmallest(AT_RISK, self._on_device, key=self._value)
            wanted = [c for c in at_risk if c in fresh and self._should_write(c)]
        return wanted

    def _fits(self, checkpoint: Checkpoint) -> bool:
        """Whether the host tier has room for it, or something that is worth less."""
        host, info = self.host, self._info
        if not host.budget:
            return False
        blocks = -(-checkpoint.position // info.block_tokens) - len(host.shared(checkpoint.node))
        nbytes = info.slab_bytes + blocks * info.block_bytes
        if nbytes > host.budget:
            return False
        if host.used + nbytes <= host.budget:
            return True
        least = min(host.loose(), key=self._value, default=None)
        return least is not None and self._value(least) < self._value(checkpoint)

    def _trim(self) -> None:
        """Keep the host tier in its budget; to disk with what is worth it."""
        host = self.host
        while host.used > host.budget:
            victim = min(host.loose(), key=self._value, default=None)
            if victim is None:
                return
            if self._should_write(victim) and len(self._writing) < WRITES_MAX:
                self._write(victim)
                continue
            host.remove(victim)
            self._drop_if_lost(victim)

    # ------------------------------------------------------------ host and disk

    def restore(self, scan: Scan) -> None:
        """Make known what is on disk from earlier."""
        disk = self.disk
        assert disk is not None
        disk.foreign = sorted(scan.foreign, key=lambda c: -c.used)
        disk.used = sum(copy.nbytes for copy in scan.foreign)
        for found in sorted(scan.found, key=lambda f: f.copy.used):
            node = self._index.insert(found.tokens)
            self._index.hold(node)
            if node.checkpoint is None:
                checkpoint = Checkpoint(node, found.kind, self._now())
                checkpoint.disk = found.copy
                self._index.attach(node, checkpoint)
                disk.used += found.copy.nbytes
                self.files += 1
            self._index.release(node)
        self.bad_files += scan.bad
        _log.info(
            "checkpoints on disk", found=len(scan.found), other_models=len(scan.foreign),
            ignored=scan.bad, bytes=disk.used,
        )  # fmt: skip
        self._keep_budget()

    def read(self, checkpoint: Checkpoint, reader: Reader) -> None:
        """Bring a checkpoint to host memory for a reader."""
        readers = self._reading.get(checkpoint)
        if readers is not None:
            if reader not in readers:
                readers.append(reader)
            return
        disk, copy = self.disk, checkpoint.disk
        assert disk is not None
        assert copy is not None
        self._reading[checkpoint] = [reader]
        tokens, store = checkpoint.node.ids(), disk.store
        disk.runner.run(
            lambda: store.read(copy, tokens), lambda images, e: self._read(checkpoint, images, e)
        )

    def forget(self, reader: Reader) -> None:
        """A reader needs nothing any more."""
        for readers in self._reading.values():
            if reader in readers:
                readers.remove(reader)
        if reader.pinned is not None:
            reader.pinned.pins -= 1
            reader.pinned = None
            self._trim()

    def unpin(self, copy: HostCopy) -> None:
        copy.pins -= 1
        self._trim()

    def flush(self) -> None:
        """Write what is in host memory and lasting, most valuable first; the device follows wave
        by wave while `flushing`."""
        self.flushing = self.dirty = True
        for checkpoint in sorted(self.host.loose(), key=self._durable_value, reverse=True):
            if self._should_write(checkpoint):
                self._write(checkpoint)

    def clear(self) -> None:
        """Forget what is in host memory and not in use."""
        for checkpoint in self.host.loose():
            self.host.remove(checkpoint)
            self._drop_if_lost(checkpoint)

    def abandon(self) -> None:
        """No wave will be heard of any more."""
        if self.active is not None:
            self._end_save(None)

    def _should_write(self, checkpoint: Checkpoint) -> bool:
        if self.disk is None or checkpoint.disk is not None or checkpoint in self._writing:
            return False
        if self.write_errors >= WRITE_ERRORS_MAX or not lasting(checkpoint):
            return False
        return checkpoint.position >= self._policy.disk_min_tokens and self._fits_disk(checkpoint)

    def _fits_disk(self, checkpoint: Checkpoint) -> bool:
        """Whether there is room for its file, or files that are worth less."""
        disk, info = self.disk, self._info
        assert disk is not None
        blocks = -(-checkpoint.position // info.block_tokens)
        nbytes = info.slab_bytes + blocks * info.block_bytes + 4 * checkpoint.position + HEAD_BYTES
        if nbytes > disk.budget:
            return False
        free = disk.budget - disk.used + sum(copy.nbytes for copy in disk.foreign)
        if nbytes <= free:
            return True
        worth = self._durable_value(checkpoint)
        own = (c for c in self._index.checkpoints() if self._durable_value(c) < worth)
        less = [c.disk for c in own if c.disk is not None]
        return nbytes <= free + sum(copy.nbytes for copy in less)

    def _write(self, checkpoint: Checkpoint) -> None:
        disk, copy = self.disk, checkpoint.host
        assert copy is not None
        if disk is None or checkpoint in self._writing:
            return
        self._writing.add(checkpoint)
        copy.pins += 1
        tokens, store = checkpoint.node.ids(), disk.store
        kind, slab, blocks = checkpoint.kind, copy.slab, [b.data for b in copy.blocks]
        disk.runner.run(
            lambda: store.write(tokens, kind, slab, blocks),
            lambda written, e: self._written(checkpoint, copy, written, e),
        )

    def _written(
        self, checkpoint: Checkpoint, copy: HostCopy, written: DiskCopy, error: Exception | None
    ) -> None:
        assert self.disk is not None
        self._writing.discard(checkpoint)
        copy.pins -= 1
        if error is not None:
            _log.error("a checkpoint could not be written", error=repr(error))
            self.write_errors += 1
            if not self.host.budget and not copy.pins and checkpoint.host is copy:
                self.host.remove(checkpoint)
                self._drop_if_lost(checkpoint)
        else:
            self.writes += 1
            checkpoint.disk = written
            self.disk.used += written.nbytes
            self.files += 1
            self._keep_budget()
        self._trim()
        self.dirty = True
        self.start_save()
        self.on_change()

    def _read(self, checkpoint: Checkpoint, images: Any, error: Exception | None) -> None:
        readers = self._reading.pop(checkpoint)
        if error is not None:
            if not isinstance(error, (BadFile, OSError)):
                raise error
            self.bad_files += 1
            _log.warning("a checkpoint on disk is not usable", error=str(error))
            if checkpoint.disk is not None:
                self._remove_file(checkpoint)
        else:
            self.reads += 1
            if checkpoint.host is None and checkpoint.stored:
                slab, blocks = images
                full = checkpoint.position // self._info.block_tokens
                known = self.host.shared(checkpoint.node)[:full]
                made = known + [HostBlock(image) for image in blocks[len(known) :]]
                self.host.add(checkpoint, HostCopy(slab, made))
            if checkpoint.host is not None:
                for reader in readers:
                    reader.pinned = checkpoint.host
                    reader.pinned.pins += 1
        self._trim()
        self.on_change()

    def _keep_budget(self) -> None:
        """Remove files, those of others first, oldest first, then the ones worth least."""
        disk = self.disk
        assert disk is not None
        while disk.used > disk.budget and disk.foreign:
            copy = disk.foreign.pop()
            disk.used -= copy.nbytes
            self._unlink(copy)
        while disk.used > disk.budget:
            own = [c for c in self._index.checkpoints() if c.disk and c not in self._reading]
            victim = min(own, key=self._durable_value, default=None)
            if victim is None:
                return
            self._remove_file(victim)

    def _remove_file(self, checkpoint: Checkpoint) -> None:
        disk, copy = self.disk, checkpoint.disk
        assert disk is not None
        assert copy is not None
        checkpoint.disk = None
        disk.used -= copy.nbytes
        self.files -= 1
        self._unlink(copy)
        self._drop_if_lost(checkpoint)

    def _unlink(self, copy: DiskCopy) -> None:
        disk = self.disk
        assert disk is not None
        store = disk.store
        disk.runner.run(lambda: store.remove(copy), _ignore)

    def _drop_if_lost(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.stored:
            self._drop(checkpoint)

    def _value(self, checkpoint: Checkpoint) -> float:
        return value(checkpoint, self._now())

    def _durable_value(self, checkpoint: Checkpoint) -> float:
        return durable_value(checkpoint, self._now())


def _ignore(result: Any, error: Exception | None) -> None:
    if error is not None:
        _log.warning("a checkpoint file could not be removed", error=repr(error))
