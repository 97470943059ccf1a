"""Outgoing: the next wave, from the plan to the moment when the engine took it.

One Wave object serves for all waves, since engines copy what they are given. While the same
sequences just decode on (`steady`), even its row list stands: each row moved when its result was
applied, and is only given drafts, or its next block."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from kslserve.engine.types import OpKind, RowKind, SlotConfig, StateOp, TableEdit, Wave
from kslserve.sched.cache.manager import PrefixCache
from kslserve.sched.job import Guide
from kslserve.sched.memory import Memory
from kslserve.sched.plan import Budget, share
from kslserve.sched.sequence import Sequence
from kslserve.sched.spec.speculator import Speculator


class Outgoing:
    """id: of the last wave that was sent. sequences: of the rows, in their order; newcomers: those
    that it sets up. columns: of the rows; prompt: those of prompts. steady: the rows stand; whoever
    changes who runs resets it. short: one of them needs its next block. drafting: some of them have
    drafts or make some. moves: the wave also copies between device and host."""

    __slots__ = (
        "_aimed", "_edited", "_masked", "_planned", "cache", "columns", "drafting", "id", "memory",
        "moves", "newcomers", "prompt", "sequences", "short", "speculator", "steady", "wave",
    )  # fmt: skip

    def __init__(
        self, memory: Memory, cache: PrefixCache, speculator: Speculator | None = None
    ) -> None:
        self.memory = memory
        self.cache = cache
        self.speculator = speculator
        self.id = 0
        self.wave = Wave(0)
        self.sequences: list[Sequence] = []
        self.newcomers: list[Sequence] = []
        self.columns = 0
        self.prompt = 0
        self.steady = False
        self.short = False
        self.drafting = False
        self.moves = False
        self._edited: list[tuple[Sequence, int]] = []
        self._masked: list[tuple[Sequence, int]] = []
        self._planned = False  # since the last wave that was sent
        self._aimed = False  # the same, of rows that stand

    def plan(self, running: Items[Sequence], budget: Budget, one_newcomer: bool = False) -> None:
        """Choose rows, and set up the sequences that no wave has seen, or only the first of
        them."""
        self.cache.unplan()
        self._planned = True
        everybody = len(running)
        running = [s for s in running if not s.held_up]
        waiting = [s for s in running if s.fresh]
        self.newcomers = waiting[:1] if one_newcomer else waiting
        if len(self.newcomers) < len(waiting):
            running = [s for s in running if not s.fresh or s is waiting[0]]
        wave = self.wave
        wave.rows, wave.before, wave.after, wave.edits = [], [], [], []
        self.sequences, self._edited, self._masked = [], [], []
        self.moves = False
        if self.cache.tiers.ready:
            wave.before += self.cache.tiers.take_ops()
            self.moves = True
        if any(s.load is not None for s in self.newcomers):
            running = self._load(running)
        left = [s.prompt_left for s in running]
        grants = share(left, [s.last_wave for s in running], budget)
        self.drafting = self.short = self._aimed = False
        if self.speculator is not None:
            room = budget.columns - sum(grants)
            self.drafting = self.speculator.plan(running, grants, left, room, self.id + 1)
        self.columns = self.prompt = 0
        for sequence, n, remaining in zip(running, grants, left, strict=True):
            n = self._aim(sequence, n, remaining)
            if n > 0:
                self.columns += n
                wave.rows.append(sequence.row)
                self.sequences.append(sequence)
        for sequence in self.newcomers:
            if sequence.load is None or sequence.load.all_sent:
                self._set_up(sequence)
        for sequence in self.sequences:
            if sequence.job.guide is not None:
                self._mask(sequence, sequence.job.guide)
        for sequence in running:
            self._edit(sequence)
        all_decode = not self.prompt and 0 < len(wave.rows) == everybody
        self.steady = all_decode and len(self.newcomers) == len(waiting)

    def _aim(self, sequence: Sequence, n: int, left: int) -> int:
        """Plan a sequence's row of at most n columns; how many it has. left: what is to compute of
        its prompt; the row of one that decodes was aimed when its last token came."""
        n = sequence.row_limit(n)
        # Blocks that are promised may still be on their way from a wave in flight.
        drafter = sequence.drafter if n > 0 else None
        more = len(drafter.lanes) + drafter.propose if drafter is not None else 0
        have = self.memory.extend(sequence, sequence.computed + n + more) - sequence.computed
        n, more = min(n, have), max(0, have - n)
        if left and n > 0:
            sequence.aim_prompt(n, self.cache.cuts.plan(sequence, n))
            self.prompt += n
        if drafter is not None and n > 0:
            drafter.fit(more, sequence.row.kind is RowKind.LAST or not left)
            if left:
                sequence.row.propose = drafter.propose
            else:
                sequence.aim_drafts(drafter.lanes, drafter.propose)
                n += len(drafter.lanes)
        return n

    def again(self) -> bool:
        """Aim the rows that stand once more; False where the wave is to be planned anew."""
        speculator, wave = self.speculator, self.id + 1
        drafting = False
        if speculator is not None and wave >= speculator.nap_until:
            drafting = speculator.draft(self.sequences, wave)
        if drafting or self.drafting or self.short:
            self.drafting, self.short = drafting, False
            self._aimed = True
            self.columns = 0
            for sequence in self.sequences:
                n = self._aim(sequence, 1, 0)
                if n <= 0:
                    return False
                self.columns += n
                self._edit(sequence)
        return True

    def look(self) -> None:
        """With a wave on its way: see whether there may be drafts in the next one, if its rows
        stand."""
        speculator, wave = self.speculator, self.id + 1
        if speculator is None or wave < speculator.nap_until:
            return
        if self.steady and not self.drafting:
            speculator.look(self.sequences, wave)

    @property
    def may_draft(self) -> bool:
        """Some of the rows may draft in the next wave."""
        speculator = self.speculator
        if speculator is None:
            return False
        return self.drafting or speculator.awake(self.sequences, self.id + 1)

    @property
    def empty(self) -> bool:
        """The planned wave does nothing: all rows wait for their masks."""
        wave = self.wave
        return not (wave.rows or wave.before or wave.after or wave.edits)

    def next(self) -> Wave:
        """The planned wave under the next id, or the last one again where its rows stand."""
        self.wave.id = self.id + 1
        self.wave.same_rows = not (self._planned or self._aimed)
        return self.wave

    def sent(self) -> None:
        """The engine took it."""
        self.id = wave_id = self.wave.id
        for sequence in self.sequences:
            sequence.in_flight += 1
            sequence.last_wave = wave_id
        if self._aimed:
            self._aimed = False
            self._sent_edits()
        if not self._planned:
            return  # the same rows as last time
        self._planned = False
        if self.newcomers:
            for sequence in self.newcomers:
                sequence.last_wave = wave_id
                load = sequence.load
                if load is not None:
                    if not load.all_sent:
                        load.sent()
                        continue
                    self.cache.tiers.unpin(load.copy)
                    sequence.load = None
                sequence.fresh = False
                self.cache.forget_adoption(sequence)
            self.newcomers = []
        for sequence, version in self._masked:
            sequence.masked = version
        self._masked.clear()
        self._sent_edits()
        self.wave.before, self.wave.after = [], []
        self.cache.sent()

    def _sent_edits(self) -> None:
        if self._edited:
            for sequence, entries in self._edited:
                sequence.tabled = entries
            self._edited, self.wave.edits = [], []

    def _load(self, running: Items[Sequence]) -> Items[Sequence]:
        """Copy state from the host, behind the rows, for newcomers that start from it; who can have
        a row: those whose state was there before this wave."""
        room = self.cache.policy.move_bytes
        still: set[int] = set()
        for sequence in self.newcomers:
            load = sequence.load
            if load is None or load.all_sent:
                continue
            still.add(sequence.number)
            load.unplan()
            if room > 0:
                ops = load.take(room)
                self.wave.after += ops
                room -= sum(op.data.nbytes for op in ops)
                self.moves = True
        return [s for s in running if s.number not in still]

    def _edit(self, sequence: Sequence) -> None:
        """Tell the engine of blocks that are new in a sequence's table."""
        entries = len(sequence.blocks)
        if entries > sequence.tabled:
            new = sequence.blocks[sequence.tabled :]
            self.wave.edits.append(TableEdit(sequence.slot, sequence.tabled, new))
            self._edited.append((sequence, entries))

    def _mask(self, sequence: Sequence, guide: Guide) -> None:
        """Give the engine a mask that it does not have."""
        if guide.version != sequence.masked:
            self.wave.before.append(StateOp(OpKind.MASK, sequence.slot, data=guide.mask))
            self._masked.append((sequence, guide.version))

    def _set_up(self, sequence: Sequence) -> None:
        """Prepare the engine for a sequence that was just given its memory."""
        job, before = sequence.job, self.wave.before
        adopted, load = sequence.adopted, sequence.load
        if load is not None:
            before += self.cache.cuts.copy_of(sequence, load.checkpoint)
        elif adopted is None:
            before.append(StateOp(OpKind.ZERO_SLAB, sequence.slab))
        else:
            device = adopted.device
            assert device is not None
            before.append(StateOp(OpKind.COPY_SLAB, device.slab, sequence.slab))
            full, partial = divmod(adopted.position, self.memory.blocks.block_tokens)
            if partial:
                copy = sequence.blocks[full]
                before.append(StateOp(OpKind.COPY_BLOCK, device.blocks[full], copy))
        # Only the repetition penalty looks at the prompt.
        prompt = job.prompt_ids if job.sampling.repetition_penalty != 1.0 else None
        output = np.array(sequence.output, np.int32) if sequence.output else None
        config = SlotConfig(job.sampling, job.seed, job.stop_ids, prompt, output)
        before.append(StateOp(OpKind.CONFIGURE, sequence.slot, data=config))
        forced = job.forced
        if forced is not None and len(forced) > len(sequence.output):
            forced = forced[len(sequence.output) :]
            before.append(StateOp(OpKind.FORCE, sequence.slot, data=forced))
