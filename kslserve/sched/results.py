"""Results: what a completed wave did, applied to the sequences that had rows in it."""

from __future__ import annotations

from kslserve.core.usage import FinishReason
from kslserve.engine.types import Done, RowDone, RowKind
from kslserve.errors import BadLogits
from kslserve.sched.cache.manager import PrefixCache
from kslserve.sched.job import Guide
from kslserve.sched.limits import SchedMetrics
from kslserve.sched.memory import Memory
from kslserve.sched.outgoing import Outgoing
from kslserve.sched.plan import WaveCost
from kslserve.sched.roster import Roster
from kslserve.sched.sequence import Sequence, State
from kslserve.sched.spec.speculator import Speculator

GLANCE_EVERY = 32  # waves of which one is timed while nothing is drafted
# Of a wave: rows, columns and those of prompts; whether it moved something, and is timed for the
# speculator; and four counts.
Late = tuple[Done, tuple[int, int, int], bool, bool, int, int, int, int]


class Results:
    """Moves positions, notes tokens, ends what is finished and frees what the wave held."""

    def __init__(
        self,
        roster: Roster,
        memory: Memory,
        cache: PrefixCache,
        outgoing: Outgoing,
        cost: WaveCost,
        metrics: SchedMetrics,
        speculator: Speculator | None = None,
    ) -> None:
        self._speculator = speculator
        self._roster = roster
        self._memory = memory
        self._cache = cache
        self._outgoing = outgoing
        self._cost = cost
        self._metrics = metrics
        self._drafting = False  # some of the rows may have had drafts
        self._late: Late | None = None  # what is not counted yet
        self._ended_ns = 0  # when the last wave ended, on the engine's clock

    def apply(self, done: Done) -> None:
        """A wave completed without a fault; its rows are those of `outgoing`."""
        roster, outgoing = self._roster, self._outgoing
        self._memory.complete(done.wave)
        if self._cache.landing and self._cache.complete():
            roster.due = True
        if roster.entrance.waiting:
            roster.due = True
        speculator = self._speculator
        self._drafting = speculator is not None and done.wave >= speculator.nap_until
        if done.sampled is not None and not (outgoing.prompt or self._drafting or roster.guided):
            self._decoded(done, done.sampled)
        else:
            self._rows(done)

    def _decoded(self, done: Done, sampled: list[int]) -> None:
        """`_rows` of a wave in which all decoded one token, and nothing else happened: nearly every
        one, so there is no call for a row."""
        outgoing, counted = self._outgoing, 0
        spoken = self._roster.outbox.spoken
        for sequence, token in zip(outgoing.sequences, sampled, strict=True):
            if sequence.mark is not None:
                self._last_token(sequence, token)
                continue
            counted += 1
            sequence.in_flight -= 1
            sequence.computed = position = sequence.computed + 1
            sequence.rounds += 1
            output = sequence.output
            output.append(token)
            spoken.append((sequence, (token,), None))
            if len(output) >= sequence.limit:
                sequence.mark = (sequence.limit_reason, None)
                self._roster.end(sequence)
                continue
            sequence.fed[0] = token
            sequence.row.start = position
            if position >= sequence.room:
                outgoing.short = True  # of its next block
        self._measure(done, 0, counted, len(sampled), len(sampled))

    def _last_token(self, sequence: Sequence, token: int) -> None:
        """Of a sequence that is to end: nobody hears of it, but its state has it."""
        if sequence.state is State.ENDED:
            return  # by the wave before this one; the engine knew, and did nothing
        sequence.in_flight -= 1
        sequence.computed += 1
        sequence.output.append(token)
        if not sequence.in_flight:
            self._roster.end(sequence)

    def _rows(self, done: Done) -> None:
        """A wave of any kind."""
        roster, outgoing = self._roster, self._outgoing
        prompt = sampled = decoding = spoken = 0
        for sequence, result in zip(outgoing.sequences, done.rows, strict=True):
            if sequence.state is State.ENDED:
                continue  # by the wave before this one; the engine knew, and did nothing
            sequence.in_flight -= 1
            before = sequence.computed
            sequence.computed = position = result.position
            n = len(result.tokens)
            if before < sequence.prompt_tokens:
                prompt += min(position, sequence.prompt_tokens) - before
            else:
                decoding += 1
                spoken += n
            sequence.output += result.tokens
            if sequence.mark is None:
                sampled += n
                self._row(sequence, result)
            elif not sequence.in_flight:
                roster.end(sequence)
        self._measure(done, prompt, sampled, decoding, spoken)

    def _row(self, sequence: Sequence, result: RowDone) -> None:
        """One row: tell of its tokens, several where drafts were accepted, and end the sequence or
        aim its next row behind the last of them."""
        tokens = result.tokens
        drafter, speculator = sequence.drafter, self._speculator
        if drafter is not None and self._drafting and drafter.engaged:
            assert speculator is not None
            if sequence.row.kind is RowKind.VERIFY:
                self._metrics.rounds.inc()
                self._metrics.drafts["drafted"].inc(sequence.row.n - 1)
                self._metrics.drafts["committed"].inc(result.accepted)
            speculator.learn(sequence, drafter, result)
        if tokens:
            sequence.rounds += 1
        elif result.logprobs:
            sequence.scored = result.position
        if result.bad_logits:
            text = "The model produced logits that no token can be sampled from."
            sequence.mark = (FinishReason.CANCELLED, BadLogits(text))
        elif result.stop or result.latched:
            sequence.mark = (FinishReason.STOP, None)
        elif len(sequence.output) >= sequence.limit:
            sequence.mark = (sequence.limit_reason, None)
        elif tokens:
            guide = sequence.job.guide
            if guide is None or not self._guide(sequence, guide, result):
                sequence.aim_decode(tokens[-1])
                if result.position >= sequence.room:
                    self._outgoing.short = True  # of its next block
        if tokens or result.logprobs:
            # With what its guide forced.
            self._roster.outbox.spoken.append((sequence, result.tokens, result.logprobs))
        if sequence.mark is not None:
            self._roster.end(sequence)

    def _guide(self, sequence: Sequence, guide: Guide, result: RowDone) -> bool:
        """Tell a guide of new tokens and append what it forces; True if that ended or re-aimed its
        sequence."""
        forced = guide.advance(result.tokens)
        if not guide.ready or guide.version != sequence.masked:
            self._outgoing.steady = False
        if not forced:
            return False
        if len(sequence.output) + len(forced) >= sequence.limit:
            sequence.mark = (sequence.limit_reason, None)
            return True
        self._outgoing.steady = False
        sequence.append(forced)
        result.tokens = (*result.tokens, *forced)
        if result.logprobs is not None:
            result.logprobs = [*result.logprobs, *([(token, 0.0)] for token in forced)]
        return True

    def _measure(self, done: Done, prompt: int, sampled: int, decoding: int, spoken: int) -> None:
        """Note what is to be counted of the wave, behind the next one where that needs no plan.
        prompt, sampled: tokens; decoding, spoken: rows that decoded, and the tokens they gave."""
        outgoing, speculator = self._outgoing, self._speculator
        columns = len(outgoing.sequences), outgoing.columns, outgoing.prompt
        drafting = self._drafting or done.wave % GLANCE_EVERY == 0
        if speculator is not None and done.wave <= speculator.watched:
            drafting = True
        self._late = done, columns, outgoing.moves, drafting, prompt, sampled, decoding, spoken
        # A plain wave that the speculator has waited for says whether the next one may draft.
        if not outgoing.steady or (self._drafting and not outgoing.drafting):
            self.count()

    def count(self) -> None:
        """Counts and times of the wave that was applied last, if that is not done yet; the next one
        may have been sent since."""
        if self._late is None:
            return
        done, (rows, columns, prompts), moves, drafting, *tokens = self._late
        self._late = None
        ms = (done.ended_ns - done.started_ns) / 1e6
        since_ns = done.ended_ns - self._ended_ns
        if not moves:
            self._cost.observe(columns, prompts, ms - done.drafts_ns / 1e6)
        if drafting and self._speculator is not None:
            self._speculator.wave(done, since_ns, rows, columns, not (moves or prompts))
        prompt, sampled, decoding, spoken = tokens
        metrics = self._metrics
        metrics.wave.observe(ms / 1e3)
        metrics.waves.inc()
        metrics.prompt_tokens.inc(prompt)
        metrics.output_tokens.inc(sampled)
        if spoken:
            # Each row had its last token in the wave before.
            metrics.gap.observe(since_ns / 1e9 * decoding / spoken, spoken)
        self._ended_ns = done.ended_ns
