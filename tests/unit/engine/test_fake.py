"""The fake engine: it refuses what the contract forbids and notices state that is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.engine.fake import FakeEngine, Faults, VirtualClock
from kslserve.engine.model import PoolSizes
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
from kslserve.errors import EngineError, EnginePoisoned

SIZES = PoolSizes(3, 5, 12, 16, 4, 40, 2)
VOCAB = 100


class Bench:
    def __init__(self, **options: object) -> None:
        self.clock = VirtualClock()
        self.engine = FakeEngine(SIZES, vocab=VOCAB, clock=self.clock, **options)  # type: ignore[arg-type]
        self.done: list[Done] = []
        self.engine.start(self.done.append)
        self.waves = 0

    def run(self, *rows: Row, **parts: object) -> Done:
        self.waves += 1
        assert self.engine.submit(Wave(self.waves, list(rows), **parts))  # type: ignore[arg-type]
        self.clock.run()
        return self.done[-1]

    def refuse(self, match: str, *rows: Row, **parts: object) -> None:
        with pytest.raises(EngineError, match=match):
            self.engine.submit(Wave(self.waves + 1, list(rows), **parts))  # type: ignore[arg-type]

    def begin(self, slot: int = 0, **config: object) -> None:
        """Slot and slab of that number with a table of four blocks, nothing computed."""
        settings = SlotConfig(SamplingParams(), 7, **config)  # type: ignore[arg-type]
        self.run(
            before=[
                StateOp(OpKind.ZERO_SLAB, slot),
                StateOp(OpKind.CONFIGURE, slot, data=settings),
            ],
            edits=[TableEdit(slot, 0, range(4 * slot, 4 * slot + 4))],
        )


def last(start: int, tokens: list[int], slot: int = 0, **changes: object) -> Row:
    return Row(RowKind.LAST, slot, slot, start, len(tokens), tokens, **changes)  # type: ignore[arg-type]


def generate(bench: Bench, prompt: list[int], cuts: list[int], count: int) -> list[int]:
    """Tokens after a prompt that is computed in chunks."""
    start = 0
    for end in cuts:
        bench.run(Row(RowKind.PREFILL, 0, 0, start, end - start, prompt[start:end]))
        start = end
    tokens = list(bench.run(last(start, prompt[start:])).rows[0].tokens)
    while len(tokens) < count:
        (row,) = bench.run(last(len(prompt) + len(tokens) - 1, [-1])).rows
        tokens += row.tokens
    return tokens


@pytest.mark.parametrize("cuts", [[], [1], [5, 9], [16], [3, 17, 19]])
def test_tokens_depend_on_tokens_alone(cuts: list[int]) -> None:
    prompt = list(range(20))
    whole, chunked = Bench(), Bench()
    whole.begin()
    chunked.begin()
    assert generate(chunked, prompt, cuts, 12) == generate(whole, prompt, [], 12)


def test_seed_and_temperature() -> None:
    def tokens(seed: int, temperature: float) -> tuple[int, ...]:
        bench = Bench()
        bench.begin()
        config = SlotConfig(SamplingParams(temperature=temperature), seed)
        bench.run(before=[StateOp(OpKind.CONFIGURE, 0, data=config)])
        return tuple(generate(bench, [1, 2, 3], [], 8))

    assert tokens(1, 1.0) != tokens(2, 1.0)
    assert tokens(1, 0.0) == tokens(2, 0.0)


def edit_row(**changes: object) -> Callable[[Row], None]:
    def apply(row: Row) -> None:
        for name, value in changes.items():
            setattr(row, name, value)

    return apply


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (edit_row(slot=3), "slot 3"),
        (edit_row(slab=5), "slab 5"),
        (edit_row(n=0, tokens=[]), "positions"),
        (edit_row(start=-1), "positions"),
        (edit_row(start=62), "ends at position 65"),
        (edit_row(tokens=[1, 2]), "2 tokens, not 3"),
        (edit_row(tokens=[1, 2, VOCAB]), "token 100 at 2"),
        (edit_row(tokens=[1, -1, 2]), "token -1 at 1"),
        (edit_row(tokens=[-1, 1, 2]), "sampled nothing"),
        (edit_row(draft=Draft.GIVEN), "drafts outside"),
        (edit_row(kind=RowKind.VERIFY), "2 drafts"),
        (edit_row(propose=1), "propose"),
        (edit_row(top_n=21), "top 21"),
        (edit_row(cuts=((4, 4),)), "cut at 4"),
        (edit_row(cuts=((2, 4), (1, 3))), "cut at 1"),
        (edit_row(cuts=((2, 0),)), "slab 0 is used twice"),
        (edit_row(cuts=((1, 5),)), "cut to slab 5"),
        (edit_row(slot=2, slab=2), "not configured"),
    ],
)
def test_bad_rows_are_refused(change: Callable[[Row], None], match: str) -> None:
    bench = Bench()
    bench.begin()
    row = last(0, [1, 2, 3])
    change(row)
    bench.refuse(match, row)
    assert bench.run(last(0, [1, 2, 3])).rows[0].position == 3


def test_rows_may_not_meet() -> None:
    bench = Bench()
    bench.begin(0)
    bench.begin(1)
    bench.refuse("slot 0 is used twice", last(0, [1]), last(0, [1]))
    bench.refuse("slab 0 is used twice", last(0, [1]), Row(RowKind.LAST, 1, 0, 0, 1, [1]))
    shared = [TableEdit(1, 0, [0, 5, 6, 7])]
    bench.refuse("two writers", last(0, [1]), last(0, [1], slot=1), edits=shared)
    bench.run(last(0, [1] * 16, slot=1), edits=shared)
    bench.refuse("being written", last(0, [1]), last(16, [1], slot=1))
    bench.refuse("41 columns", Row(RowKind.PREFILL, 0, 0, 0, 41, [1] * 41))


def test_table_entries_must_be_set() -> None:
    bench = Bench()
    bench.run(
        before=[StateOp(OpKind.CONFIGURE, 0, data=SlotConfig(SamplingParams(), 1))],
        edits=[TableEdit(0, 0, [3])],
    )
    bench.refuse("entry 1 is unset", last(0, [1] * 17))
    bench.refuse("block 12", edits=[TableEdit(0, 0, [12])])
    bench.refuse("entries up to 5", edits=[TableEdit(0, 4, [1])])
    bench.refuse("no entries", edits=[TableEdit(0, 4, [])])


@pytest.mark.parametrize(
    "op",
    [
        StateOp(OpKind.ZERO_SLAB, 5),
        StateOp(OpKind.COPY_SLAB, 0, 5),
        StateOp(OpKind.COPY_SLAB, 1, 1),
        StateOp(OpKind.COPY_BLOCK, 12, 0),
        StateOp(OpKind.COPY_BLOCK, 2, 2),
        StateOp(OpKind.CONFIGURE, 3, data=SlotConfig(SamplingParams(), 1)),
        StateOp(OpKind.CONFIGURE, 0),
        StateOp(OpKind.CONFIGURE, 0, data=SlotConfig(SamplingParams(), 1, tuple(range(33)))),
        StateOp(OpKind.MASK, -1),
        StateOp(OpKind.FORCE, 0, data=np.array([VOCAB])),
    ],
    ids=lambda op: op.kind.name,
)
def test_bad_ops_are_refused(op: StateOp) -> None:
    bench = Bench()
    bench.refuse("Invalid wave", before=[op])
    bench.refuse("Invalid wave", after=[op])


def test_wrong_start_is_noticed() -> None:
    bench = Bench()
    bench.begin()
    bench.run(last(0, [1, 2, 3]))
    with pytest.raises(AssertionError, match="holds 3 positions"):
        bench.engine.submit(Wave(9, [last(4, [1])]))


def test_overwritten_block_is_noticed() -> None:
    bench = Bench()
    bench.begin(0)
    bench.begin(1)
    bench.run(last(0, [1] * 20))
    bench.run(last(0, [2] * 3, slot=1), edits=[TableEdit(1, 0, [0])])
    with pytest.raises(AssertionError, match="block 0 of slot 0"):
        bench.engine.submit(Wave(9, [last(20, [1])]))


def test_stop_latches_and_configure_unlatches() -> None:
    free = Bench()
    free.begin()
    expected = generate(free, [4, 5], [], 3)
    bench = Bench()
    bench.begin(stop_ids=(expected[0],))
    (row,) = bench.run(last(0, [4, 5])).rows
    assert (row.stop, row.tokens) == (True, (expected[0],))
    (row,) = bench.run(last(2, [-1])).rows
    assert (row.latched, row.tokens, row.position) == (True, (), 2)
    bench.begin()
    assert generate(bench, [4, 5], [], 3) == expected


def test_verify_commits_the_agreeing_prefix() -> None:
    plain = Bench()
    plain.begin()
    expected = generate(plain, [1, 2, 3], [], 8)
    bench = Bench()
    bench.begin()
    got = list(bench.run(last(0, [1, 2, 3])).rows[0].tokens)
    wrong = (expected[3] + 1) % VOCAB
    drafts = [got[0], expected[1], expected[2], wrong, 0]
    row = Row(RowKind.VERIFY, 0, 0, 3, 5, drafts, draft=Draft.GIVEN, top_n=1)
    (result,) = bench.run(row).rows
    assert result.tokens == tuple(expected[1:4])
    assert (result.accepted, result.position) == (2, 6)
    assert result.logprobs is not None
    assert [entry[0][0] for entry in result.logprobs] == expected[1:4]
    (result,) = bench.run(last(6, [-1])).rows
    assert result.tokens == (expected[4],)


def test_own_drafts_give_the_same_tokens_faster() -> None:
    plain = Bench()
    plain.begin()
    expected = generate(plain, [1, 2, 3], [], 40)
    bench = Bench(has_mtp=True)
    bench.begin()
    (result,) = bench.run(last(0, [1, 2, 3], propose=3)).rows
    got, waves = list(result.tokens), 0
    while len(got) < 40:
        position = result.position
        row = Row(RowKind.VERIFY, 0, 0, position, 4, [-1], draft=Draft.OWN, propose=3)
        (result,) = bench.run(row).rows
        assert len(result.tokens) == result.accepted + 1
        got += result.tokens
        waves += 1
    assert got[:40] == expected
    assert waves < 30


def test_cut_and_copy_continue_like_the_original() -> None:
    plain = Bench()
    plain.begin()
    expected = generate(plain, [*range(16), 50, 51], [], 4)
    bench = Bench()
    bench.begin(0)
    bench.run(last(0, [*range(16), 60, 61, 62], cuts=((16, 4),)))
    bench.begin(1)
    bench.run(
        last(16, [50, 51], slot=1),
        before=[StateOp(OpKind.COPY_SLAB, 4, 1)],
        edits=[TableEdit(1, 0, [0])],
    )
    assert bench.done[-1].rows[0].tokens == (expected[0],)


def test_save_and_load() -> None:
    bench = Bench()
    bench.begin(0)
    info = bench.engine.info
    slab, block = np.zeros(info.slab_bytes, np.uint8), np.zeros(info.block_bytes, np.uint8)
    first = bench.run(
        last(0, [1, 2, 3]),
        after=[
            StateOp(OpKind.SAVE_SLAB, 0, data=slab),
            StateOp(OpKind.SAVE_BLOCK, 0, data=block),
        ],
    )
    token = first.rows[0].tokens[0]
    expected = bench.run(last(3, [token])).rows[0].tokens
    bench.begin(1)
    loaded = bench.run(
        last(3, [token], slot=1),
        before=[
            StateOp(OpKind.LOAD_SLAB, 1, data=slab),
            StateOp(OpKind.LOAD_BLOCK, 4, data=block),
        ],
    )
    assert loaded.rows[0].tokens == expected


def test_score_rows() -> None:
    bench = Bench()
    bench.begin()
    row = Row(RowKind.SCORE, 0, 0, 0, 3, [1, 2, 3, -1], top_n=2)
    (result,) = bench.run(row).rows
    assert result.tokens == ()
    assert result.logprobs is not None
    assert [entry[0][0] for entry in result.logprobs] == [2, 3, -1]
    assert all(len(entry) == 3 for entry in result.logprobs)


def test_mask_and_nothing_left() -> None:
    bench = Bench()
    bench.begin()
    mask = np.zeros(4, dtype=np.uint32)
    mask[1] = 1 << 9
    (row,) = bench.run(last(0, [1]), before=[StateOp(OpKind.MASK, 0, data=mask)]).rows
    assert row.tokens == (41,)
    empty = StateOp(OpKind.MASK, 0, data=np.zeros(4, dtype=np.uint32))
    (row,) = bench.run(last(1, [41]), before=[empty]).rows
    assert row.bad_logits
    assert row.tokens == ()


def test_waves_take_time_and_end_in_order() -> None:
    bench = Bench(wave_s=0.5, column_s=0.1)
    bench.begin()
    assert bench.engine.submit(Wave(2, [last(0, [1, 2])]))
    assert bench.engine.submit(Wave(3, [last(2, [-1])]))
    assert not bench.engine.submit(Wave(4, [last(3, [-1])]))
    assert bench.engine.progress().phase == "running"
    bench.clock.run()
    assert [d.wave for d in bench.done] == [1, 2, 3]
    assert [d.started_ns // 10**8 for d in bench.done] == [0, 5, 12]
    assert bench.clock.now() == pytest.approx(0.5 + 0.7 + 0.6)
    assert bench.engine.progress().phase == "idle"


def test_faults() -> None:
    bench = Bench(faults=Faults(refuse={2}, fatal={3}, slow={2: 9.0}))
    bench.begin()
    bench.refuse("fault hook", last(0, [1]))
    assert bench.run(last(0, [1])).rows[0].position == 1
    assert bench.clock.now() == 9.0
    done = bench.run(last(1, [-1]))
    assert done.error is not None
    assert done.rows == []
    with pytest.raises(EnginePoisoned):
        bench.engine.submit(Wave(4))
    assert bench.engine.progress().phase == "poisoned"


def test_ids_of_waves_increase() -> None:
    bench = Bench()
    bench.begin()
    bench.waves = 0
    bench.refuse("id 1 after 1")


async def test_real_time() -> None:
    engine = FakeEngine(SIZES, vocab=VOCAB)
    finished: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
    engine.start(finished.set_result)
    with pytest.raises(EngineError):
        engine.start(finished.set_result)
    assert engine.submit(Wave(1))
    assert not finished.done()  # never from inside submit
    assert (await finished).wave == 1
    engine.close()
    engine.close()
    with pytest.raises(EngineError):
        engine.submit(Wave(2))


def test_virtual_clock() -> None:
    clock = VirtualClock()
    heard: list[str] = []
    clock.call_later(2, lambda: heard.append("c"))
    clock.call_later(1, lambda: heard.append("a"))
    clock.call_later(1, lambda: heard.append("b"))
    clock.call_later(1, lambda: heard.append("never")).cancel()
    clock.run(until=1.5)
    assert (heard, clock.now()) == (["a", "b"], 1.5)
    clock.call_later(0, lambda: heard.append("now"))
    clock.run()
    assert (heard, clock.now()) == (["a", "b", "now", "c"], 2)
    assert not clock.step()


def test_rows_that_stand_give_what_checked_ones_do() -> None:
    """The engine of benches, which takes a short way through waves that decode on: the same rows,
    stops and forced ids included, and `sampled` says what they say or is None."""

    def decoded(strict: bool, stop_ids: tuple[int, ...]) -> list[Done]:
        bench = Bench(strict=strict)
        for slot in range(3):
            bench.begin(slot, stop_ids=stop_ids if slot == 2 else ())
        forced = StateOp(OpKind.FORCE, 1, data=np.arange(5, dtype=np.int32))
        rows = [last(0, [slot + 1], slot) for slot in range(3)]
        bench.run(*rows, before=[forced])
        wave = Wave(bench.waves, rows)
        for _ in range(40):
            bench.waves += 1
            wave.id = bench.waves
            for row in rows:
                row.start, row.tokens = row.start + 1, [-1]
            assert bench.engine.submit(wave)
            bench.clock.run()
            wave.same_rows = True
        return bench.done

    stop_ids = decoded(True, ())[25].rows[2].tokens
    waves = list(zip(decoded(True, stop_ids), decoded(False, stop_ids), strict=True))
    for checked, quick in waves:
        assert checked.rows == quick.rows
        if quick.sampled is not None:
            assert quick.sampled == checked.sampled == [row.tokens[0] for row in quick.rows]
    assert [done.sampled is not None for done, _ in waves].count(True) > 4
    assert any(row.stop for done, _ in waves for row in done.rows)
    assert waves[-1][1].rows[2].latched
