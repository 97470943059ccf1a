"""Tiers: copies of checkpoints below the device, in host memory and in files.

Everything here happens beside the waves. Device to host and back are ops that ride in waves, a
bounded part in each; files are read and written by one disk thread. What is copied down stays
usable above meanwhile; what is evicted above before its copy is complete is lost, which costs a
prefill and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from math import inf

from kslserve.engine.types import EngineInfo, StateOp
from kslserve.sched.cache import moves
from kslserve.sched.cache.checkpoint import Checkpoint
from kslserve.sched.cache.diskstore import Scan
from kslserve.sched.cache.disktier import Disk, DiskTier, Reader
from kslserve.sched.cache.hosttier import HostCopy, HostTier
from kslserve.sched.cache.index import RadixIndex
from kslserve.sched.cache.moves import Transfer
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.cache.value import durable_value, lasting, value

AT_RISK = 3  # checkpoints on the device that may be the next to go


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
        self.disk: DiskTier | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.flushing = False
        self.dirty = False  # something changed since nothing was found worth copying
        self.active: Transfer | None = None  # to host
        self._policy = policy
        self._info = info
        self._index = index
        self._on_device = on_device
        self._now = now
        self._under_pressure = under_pressure
        self._drop = drop

    def use_disk(self, disk: Disk, scan: Scan) -> None:
        """Have a disk tier from now on. scan: what its folder holds."""
        self.disk = DiskTier(
            disk, self._policy, self._info, self._index, self.host, self._now,
            self._drop_if_lost, self._disk_settled,
        )  # fmt: skip
        self.disk.restore(scan)

    @property
    def enabled(self) -> bool:
        return self.disk is not None or self.host.budget > 0

    @property
    def busy(self) -> bool:
        """Something is on its way down."""
        return self.active is not None or (self.disk is not None and self.disk.busy)

    @property
    def ready(self) -> bool:
        """The next wave should carry ops of ours."""
        return self.active is not None and self.active.ready

    # ------------------------------------------------------------ device to host

    def start_save(self) -> None:
        """Begin to copy down what is worth it, if nothing is on its way. Where host memory has no
        room for it now, a later call will find some: readers come first."""
        if self.active is not None or not self.dirty:
            return
        if self.disk is not None and (self.disk.full or self.disk.waiting):
            return
        wanted = self._wanted() if self.enabled else []
        if not wanted:
            self.dirty = False
            return
        checkpoint = max(wanted, key=self._durable_value)
        assert checkpoint.device is not None
        host, info = self.host, self._info
        if self._fits(checkpoint):
            self._trim(self._new_bytes(checkpoint), self._value(checkpoint))
        if not host.has_way(self._new_bytes(checkpoint)):
            return
        known = host.shared(checkpoint.node)[: checkpoint.position // info.block_tokens]
        missing = len(checkpoint.device.blocks) - len(known)
        (slab,) = host.images.take(info.slab_bytes)
        images = host.images.take(info.block_bytes, missing)
        self.active = moves.save(checkpoint, slab, known, images, self._policy.part_bytes)
        host.hold(known)
        host.coming += self.active.nbytes
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
        self._next_moves()

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

    def abandon(self) -> None:
        """No wave will be heard of any more."""
        if self.active is not None:
            self._end_save(None)

    def _end_save(self, copy: HostCopy | None) -> None:
        active, self.active = self.active, None
        assert active is not None
        checkpoint = active.checkpoint
        checkpoint.moving = False
        keeps = copy is not None and checkpoint.host is None
        if copy is not None and keeps:
            self.host.add(checkpoint, copy)
        self.host.coming -= active.nbytes
        self.host.release(active.known)
        if not keeps:
            self._drop_if_lost(checkpoint)
            return
        if self.disk is not None and (self.flushing or not self.host.budget):
            self.disk.write(checkpoint)
        self._trim()

    def _wanted(self) -> list[Checkpoint]:
        """Checkpoints on the device that should be copied down now: when flushing, all for the
        disk; else what the host tier has room for, and for the disk those that are next to be
        evicted, so that what is superseded within a turn or two is never written."""
        fresh = [c for c in self._on_device if c.host is None and not c.moving and lasting(c)]
        if self.flushing:
            return [c for c in fresh if self._for_disk(c)]
        # What was dropped right after it was copied would be again.
        fresh = [c for c in fresh if c.tried != self._now()]
        wanted = [c for c in fresh if self._fits(c)]
        if not wanted and self.disk is not None and fresh and self._under_pressure():
            at_risk = nsmallest(AT_RISK, self._on_device, key=self._value)
            wanted = [c for c in at_risk if c in fresh and self._for_disk(c)]
        return wanted

    # ------------------------------------------------------------ host memory

    def unpin(self, copy: HostCopy) -> None:
        copy.pins -= 1
        self._trim()
        if self.disk is not None:
            self.disk.begin_reads()

    def clear(self, stays: Callable[[Checkpoint], bool] = lambda checkpoint: False) -> None:
        """Forget what is in host memory and not in use, but for what `stays`."""
        for checkpoint in [c for c in self.host.loose() if not stays(c)]:
            self.host.remove(checkpoint)
            self._drop_if_lost(checkpoint)

    def _fits(self, checkpoint: Checkpoint) -> bool:
        """Whether the host tier has room for it, or something that is worth less."""
        host = self.host
        if not host.budget:
            return False
        nbytes = self._new_bytes(checkpoint)
        if nbytes > host.budget:
            return False
        if host.used + nbytes <= host.budget:
            return True
        least = min(host.loose(), key=self._value, default=None)
        return least is not None and self._value(least) < self._value(checkpoint)

    def _new_bytes(self, checkpoint: Checkpoint) -> int:
        """Bytes of the images that a host copy of it would add."""
        info = self._info
        blocks = -(-checkpoint.position // info.block_tokens)
        blocks -= len(self.host.shared(checkpoint.node))
        return info.slab_bytes + blocks * info.block_bytes

    def _trim(self, nbytes: int = 0, below: float = inf) -> None:
        """Keep the host tier in its budget, with room for `nbytes` more where what is worth less
        than `below` can give it; to disk with what is worth it."""
        host, disk = self.host, self.disk
        while host.used + nbytes > host.budget:
            victim = min(host.loose(), key=self._value, default=None)
            if victim is None or self._value(victim) >= below:
                return
            if disk is not None and disk.wants(victim) and not disk.full:
                disk.write(victim)
                continue
            host.remove(victim)
            self._drop_if_lost(victim)

    # ------------------------------------------------------------ disk

    def read(self, checkpoint: Checkpoint, reader: Reader) -> None:
        """Bring a checkpoint from disk to host memory for a reader."""
        assert self.disk is not None
        self.disk.read(checkpoint, reader)

    def forget(self, reader: Reader) -> None:
        """A reader needs nothing any more."""
        if self.disk is not None:
            self.disk.forget(reader)
        if reader.pinned is not None:
            copy, reader.pinned = reader.pinned, None
            self.unpin(copy)

    def flush(self) -> None:
        """Write what is in host memory and lasting, most valuable first; the device follows wave
        by wave while `flushing`."""
        self.flushing = self.dirty = True
        for checkpoint in sorted(self.host.loose(), key=self._durable_value, reverse=True):
            if self.disk is not None and self.disk.wants(checkpoint):
                self.disk.write(checkpoint)

    def _for_disk(self, checkpoint: Checkpoint) -> bool:
        return self.disk is not None and self.disk.wants(checkpoint)

    def _disk_settled(self) -> None:
        """A file was written or read, or could not be."""
        self._trim()
        self.dirty = True
        self._next_moves()
        self.on_change()

    def _next_moves(self) -> None:
        """There may be room in host memory."""
        if self.disk is not None:
            self.disk.begin_reads()
        self.start_save()

    def _drop_if_lost(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.stored:
            self._drop(checkpoint)

    def _value(self, checkpoint: Checkpoint) -> float:
        return value(checkpoint, self._now())

    def _durable_value(self, checkpoint: Checkpoint) -> float:
        return durable_value(checkpoint, self._now())
