"""Outgoing: the next wave, from the plan to the moment when the engine took it.

One Wave object serves for all waves, since engines copy what they are given. While the same
sequences just decode on (`steady`), even its row list stands: each row moved when its result was
applied."""

from __future__ import annotations

from collections.abc import Sequence as Items

from kslserve.engine.types import OpKind, SlotConfig, StateOp, TableEdit, Wave
from kslserve.sched.plan import Budget, share
from kslserve.sched.sequence import Sequence


class Outgoing:
    """id: of the last wave that was sent. sequences: of the rows, in their order; newcomers: those
    that it sets up. columns: of the rows; prompt: those of prompts. steady: the rows stand; whoever
    changes who runs resets it."""

    __slots__ = ("columns", "id", "newcomers", "prompt", "sequences", "steady", "wave")

    def __init__(self) -> None:
        self.id = 0
        self.wave = Wave(0)
        self.sequences: list[Sequence] = []
        self.newcomers: list[Sequence] = []
        self.columns = 0
        self.prompt = 0
        self.steady = False

    def plan(self, running: Items[Sequence], budget: Budget, one_newcomer: bool = False) -> None:
        """Choose rows, and set up the sequences that no wave has seen, or only the first of
        them."""
        waiting = [s for s in running if s.fresh]
        self.newcomers = waiting[:1] if one_newcomer else waiting
        if len(self.newcomers) < len(waiting):
            running = [s for s in running if not s.fresh or s is waiting[0]]
        left = [s.prompt_left for s in running]
        grants = share(left, [s.last_wave for s in running], budget)
        wave = self.wave
        wave.rows, wave.before, wave.edits = [], [], []
        for sequence in self.newcomers:
            _set_up(sequence, wave)
        self.sequences = []
        self.columns = self.prompt = 0
        for sequence, n, remaining in zip(running, grants, left, strict=True):
            if not n:
                continue
            if remaining:
                sequence.aim_prompt(n)
                self.prompt += n
            self.columns += n
            wave.rows.append(sequence.row)
            self.sequences.append(sequence)
        all_decode = not self.prompt and len(wave.rows) == len(running)
        self.steady = all_decode and len(self.newcomers) == len(waiting)

    def next(self) -> Wave:
        """The planned wave under the next id."""
        self.wave.id = self.id + 1
        return self.wave

    def sent(self) -> None:
        """The engine took it."""
        self.id = wave_id = self.wave.id
        for sequence in self.sequences:
            sequence.in_flight = True
            sequence.last_wave = wave_id
        if self.newcomers:
            for sequence in self.newcomers:
                sequence.fresh = False
                sequence.last_wave = wave_id
            self.newcomers = []
            self.wave.before, self.wave.edits = [], []


def _set_up(sequence: Sequence, wave: Wave) -> None:
    """Prepare the engine for a sequence that was just given its memory."""
    job = sequence.job
    # Only the repetition penalty looks at the prompt.
    prompt = job.prompt_ids if job.sampling.repetition_penalty != 1.0 else None
    config = SlotConfig(job.sampling, job.seed, job.stop_ids, prompt)
    wave.before.append(StateOp(OpKind.ZERO_SLAB, sequence.slab))
    wave.before.append(StateOp(OpKind.CONFIGURE, sequence.slot, data=config))
    if job.forced is not None:
        wave.before.append(StateOp(OpKind.FORCE, sequence.slot, data=job.forced))
    wave.edits.append(TableEdit(sequence.slot, 0, sequence.blocks))
