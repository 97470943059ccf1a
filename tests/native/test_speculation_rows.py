"""VERIFY rows and MTP drafts: whatever is drafted, ids and state are those of plain decode."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import pytest
from _kslserve import lib
from hypothesis import given, settings
from hypothesis import strategies as st

from kslserve.core.sampling import SamplingParams
from kslserve.engine.budget import KV_FORMATS
from kslserve.engine.sampling import reference_sample
from kslserve.engine.types import Draft, OpKind, RowKind, SlotConfig, StateOp
from tests.native.conftest import Engines
from tests.native.driver import ISA_PATHS, Driver, Stream
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors, tiny_values

IDS = np.random.default_rng(9).integers(0, 199, 200).astype(np.int32)
GREEDY = SamplingParams(temperature=0.0)
PENALTIES = SamplingParams(
    temperature=0.0, presence_penalty=0.8, frequency_penalty=0.3, repetition_penalty=1.2
)
HOT = SamplingParams(
    temperature=1.0,
    top_k=60,
    top_p=0.97,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
)

each_path = pytest.mark.parametrize("isa", ISA_PATHS)
each_sampling = pytest.mark.parametrize("sampling", [GREEDY, PENALTIES, HOT])


def prompted(
    driver: Driver, slot: int, sampling: SamplingParams, stop_ids: tuple[int, ...] = ()
) -> tuple[Stream, int]:
    """A stream whose prompt of 30 ids is run but for its last id, and that id."""
    stream = driver.begin(slot, sampling=sampling, prompt_ids=IDS[:30], stop_ids=stop_ids)
    stream.prefill(IDS[:29])
    return stream, int(IDS[29])


@cache
def plain_ids(driver: Driver, sampling: SamplingParams) -> list[int]:
    """What plain decode samples after the prompt."""
    stream, first = prompted(driver, 0, sampling)
    return [stream.last([first]), *stream.decode(110)]


# Per step: how many right drafts, then whether a wrong one and how many more follow.
STEPS = st.lists(
    st.tuples(st.integers(0, 16), st.integers(0, 3), st.integers(1, 198)), min_size=1, max_size=5
)


@each_path
@each_sampling
@settings(max_examples=15, deadline=None)
@given(steps=STEPS)
def test_given_drafts(
    engines: Engines, isa: str, sampling: SamplingParams, steps: list[tuple[int, int, int]]
) -> None:
    driver = engines.get(isa, "bf16")
    expected = plain_ids(driver, sampling)
    spec, token = prompted(driver, 1, sampling)
    out: list[int] = []
    for right, wrong, shift in steps:
        known = expected[len(out) :]
        drafts = known[:right]
        drafts += [(t + shift) % 199 for t in known[right : right + min(wrong, 16 - right)]]
        row = spec.verify(token, drafts)
        assert row.accepted == right
        assert row.tokens == known[: right + 1]
        out += row.tokens
        token = -1
    again, first = prompted(driver, 2, sampling)
    again.last([first])
    again.decode(len(out) - 1)
    assert spec.images() == again.images()
    assert spec.decode(5) == expected[len(out) : len(out) + 5]


@each_path
@pytest.mark.parametrize("kv", KV_FORMATS)
@each_sampling
def test_own_drafts(engines: Engines, isa: str, kv: str, sampling: SamplingParams) -> None:
    driver = engines.get(isa, kv)
    plain, first = prompted(driver, 0, sampling)
    spec, _ = prompted(driver, 1, sampling)
    out = [spec.run(spec.row(RowKind.LAST, [first], propose=5)).rows[0].tokens[0]]
    accepted = 0
    for depth in (5, 3, 16, 0, 1, 5, 16, 4) * 3:
        row = spec.row(RowKind.VERIFY, [-1], 17, draft=Draft.OWN, propose=depth)
        done = spec.run(row).rows[0]
        assert done.proposed == depth
        out += done.tokens
        accepted += done.accepted
    assert len(out) == 1 + 24 + accepted
    assert [plain.last([first]), *plain.decode(len(out) - 1)] == out
    assert plain.images() == spec.images()


@each_path
@settings(max_examples=15, deadline=None)
@given(
    waves=st.lists(
        st.lists(st.tuples(st.booleans(), st.integers(0, 16), st.integers(0, 2)), min_size=3,
                 max_size=3),
        min_size=1, max_size=12,
    )
)  # fmt: skip
def test_mtp_keys_may_wait(
    engines: Engines, isa: str, waves: list[list[tuple[bool, int, int]]]
) -> None:
    """Those of a few columns are made some waves later, together: drafts and state are as if they
    had been made at once, whoever had rows beside them."""
    driver = engines.get(isa, "bf16")
    expected = plain_ids(driver, GREEDY)
    streams = [prompted(driver, slot, GREEDY)[0] for slot in range(3)]
    said: list[list[int]] = [[], [], []]
    for wave in waves:
        rows, taking = [], []
        for stream, (runs, right, wrong) in zip(streams, wave, strict=True):
            out = said[stream.slot]
            known = expected[len(out) : len(out) + right]
            if not runs or len(out) + 20 > len(expected):
                continue
            drafts = (known + [(t + 1) % 199 for t in expected[:wrong]])[:16]
            first = out[-1] if out else int(IDS[29])
            draft = Draft.GIVEN if drafts else Draft.NONE
            rows.append(stream.row(RowKind.VERIFY, [first, *drafts], draft=draft))
            taking.append(stream)
        for stream, done in zip(taking, driver.wave(rows).rows if rows else (), strict=True):
            stream.position = done.position
            said[stream.slot] += done.tokens
    for stream, out in zip(streams, said, strict=True):
        assert out == expected[: len(out)]
        ids = [int(t) for t in IDS[:30]] + out
        images = stream.images()
        again = driver.begin(3, sampling=GREEDY, prompt_ids=IDS[:30])
        prompt = again.row(RowKind.PREFILL, ids[:-1])
        # Behind rows that an operation follows, nothing waits.
        driver.wave([prompt], after=[StateOp(OpKind.COPY_SLAB, 8, 9)])
        again.position = len(ids) - 1
        assert images == again.images()
        rows = [s.row(RowKind.LAST, ids[-1:], propose=5) for s in (stream, again)]
        one, other = (driver.wave([row]).rows[0] for row in rows)
        assert one.tokens == other.tokens == expected[len(out) : len(out) + 1]
        assert one.drafts == other.drafts


@each_path
def test_mtp_keys_that_wait_are_in_shared_blocks(engines: Engines, isa: str) -> None:
    """Another sequence takes over blocks whose last positions wait."""
    driver = engines.get(isa, "bf16")
    first, token = prompted(driver, 0, GREEDY)
    out = [first.last([token]), *first.decode(3)]
    # Two blocks are full; a copy of the third is taken when there is more in it.
    second = driver.begin(2, sampling=GREEDY, prompt_ids=IDS[:30], first_block=80)
    second.share(first.blocks[:2])
    out += first.decode(5)
    copies = [
        StateOp(OpKind.COPY_SLAB, first.slab, second.slab),
        StateOp(OpKind.COPY_BLOCK, first.blocks[2], second.blocks[2]),
    ]
    driver.wave(before=copies)
    second.position = first.position
    follow, _ = prompted(driver, 1, GREEDY)
    ids = [*(int(t) for t in IDS[:30]), *out]
    follow.prefill(np.array(ids[29:-1], np.int32))
    wanted = follow.run(follow.row(RowKind.LAST, ids[-1:], propose=4)).rows[0].drafts
    row = second.run(second.row(RowKind.LAST, ids[-1:], propose=4)).rows[0]
    assert row.drafts == wanted


@each_path
@pytest.mark.parametrize("reused", ["slot", "blocks"])
def test_mtp_keys_wait_for_a_sequence_that_is_gone(engines: Engines, isa: str, reused: str) -> None:
    """Its last positions wait when another one gets its slot, or its blocks: each finds its own."""
    driver = engines.get(isa, "bf16")
    nothing = np.zeros(driver.info.block_bytes, np.uint8)  # not what a test before this one left
    driver.wave(before=[StateOp(OpKind.LOAD_BLOCK, block, data=nothing) for block in range(3)])
    first, token = prompted(driver, 0, GREEDY)
    out = [first.last([token]), *first.decode(8)]
    ids = [*(int(t) for t in IDS[:30]), *out]
    driver.wave(before=[StateOp(OpKind.COPY_SLAB, first.slab, 8)])
    position = first.position
    if reused == "slot":
        # Nothing reads or moves a block until the new one drafts.
        other = driver.begin(0, sampling=GREEDY, prompt_ids=IDS[:30], first_block=80)
        other.prefill(IDS[40:60])
        heir = driver.begin(2, sampling=GREEDY, prompt_ids=IDS[:30], first_block=64)
        heir.share(first.blocks[:3])
        driver.wave(before=[StateOp(OpKind.COPY_SLAB, 8, heir.slab)])
        heir.position = position
    else:
        heir = driver.begin(1, sampling=GREEDY, prompt_ids=IDS[:30], first_block=0)
        heir.prefill(np.array(ids[:-1], np.int32))
    row = heir.run(heir.row(RowKind.LAST, ids[-1:], propose=4)).rows[0]
    follow, _ = prompted(driver, 3, GREEDY)
    follow.prefill(np.array(ids[29:-1], np.int32))
    assert row.drafts == follow.run(follow.row(RowKind.LAST, ids[-1:], propose=4)).rows[0].drafts


def test_mtp_keys_are_made_while_nothing_runs(tiny: Driver) -> None:
    """What waited is what it would have been; some of it may not be made yet."""
    found = []
    for slot, pause_s in enumerate((0.0, 0.1)):
        stream, first = prompted(tiny, slot, GREEDY)
        ids = [stream.last([first]), *stream.decode(80)]
        time.sleep(pause_s)
        row = stream.run(stream.row(RowKind.LAST, ids[-1:], propose=5)).rows[0]
        found.append((ids, row.drafts, stream.images()))
    assert found[0] == found[1]


def test_more_mtp_keys_wait_than_there_is_room_for() -> None:
    """The oldest are made then. The other prompt comes in waves too large to wait, but for its end;
    a third one takes over the blocks of one of which nothing was ever made."""
    spec, ids = tiny_spec(), np.random.default_rng(4).integers(0, 199, 4700).astype(np.int32)
    tensors = tiny_tensors(spec, tiny_arrays(spec), "mixed")
    sizes = {"slots": 3, "slabs": 3, "blocks": 600, "blocks_per_slot": 300}
    with Driver(spec, tensors, kv="bf16", **sizes) as driver:
        found = []
        gone = driver.begin(2, first_block=0)
        for at in range(0, 2400, 120):
            gone.prefill(ids[::-1][at : at + 120])
        for slot, n in ((0, 120), (1, 160)):
            stream = driver.begin(slot, sampling=GREEDY, first_block=300 * slot)
            for at in range(0, len(ids) - 1, n):
                stream.prefill(ids[at : at + n][: len(ids) - 1 - at])
            row = driver.wave([stream.row(RowKind.LAST, ids[-1:], propose=5)]).rows[0]
            stream.position = row.position
            found.append((row.tokens, row.drafts, stream.images()))
    assert found[0] == found[1]
    assert len(found[0][1]) == 5


def test_rows_that_draft_beside_each_other(tiny: Driver) -> None:
    """Five rows draft to different depths in one wave, and verify in one: as alone."""

    def drafts_of(streams: list[Stream], together: bool) -> list[bytes]:
        rows = [
            s.row(RowKind.LAST, IDS[10 * s.slot : 10 * s.slot + 20], propose=2 + 3 * s.slot)
            for s in streams
        ]
        groups = [list(range(len(rows)))] if together else [[i] for i in range(len(rows))]
        found = []
        for group in groups:
            wave = tiny.wave([rows[i] for i in group])
            for i, row in zip(group, wave.rows, strict=True):
                streams[i].position = row.position
                assert row.proposed == 2 + 3 * i
            verify = [
                streams[i].row(RowKind.VERIFY, [-1], 3 + 3 * i, draft=Draft.OWN) for i in group
            ]
            wave = tiny.wave(verify, taps=["embed"])
            found += [np.concatenate([[row.position], row.tokens]).tobytes() for row in wave.rows]
            found.append(wave.taps["embed"].tobytes())
        return found

    beside = drafts_of([tiny.begin(i, sampling=HOT, seed=i) for i in range(5)], True)
    alone = drafts_of([tiny.begin(i, sampling=HOT, seed=i) for i in range(5)], False)
    assert beside[:5] == alone[0::2]
    assert beside[5] == b"".join(alone[1::2])


def drafted(driver: Driver, stream: Stream, n: int) -> list[int]:
    """The ids that the slot holds as drafts, found by their embeddings. Runs a VERIFY row."""
    row = stream.row(RowKind.VERIFY, [-1], 1 + n, draft=Draft.OWN)
    rows = stream.run(row, ["embed"]).taps["embed"][1:]
    table = tiny_values(tiny_spec(), tiny_arrays(tiny_spec()), "mixed")["model.embed_tokens.weight"]
    return [int(np.flatnonzero((table == row).all(axis=1))[0]) for row in rows]


def sampled(driver: Driver, logits: np.ndarray, config: SlotConfig, position: int) -> int:
    return reference_sample(logits, driver.spec.token_limit, config, position)


def test_a_draft_shares_the_noise_of_its_position(tiny: Driver) -> None:
    """A draft is what the sampler draws from the MTP logits at the draft's position, the id sampled
    before it counted."""
    agreed = 0
    for seed in range(12):
        prompt = IDS[seed : seed + 20]
        stream = tiny.begin(0, sampling=HOT, seed=seed, prompt_ids=prompt)
        token = stream.last(prompt, propose=1)
        (draft,) = drafted(tiny, stream, 1)
        forced = tiny.begin(1)
        row = forced.row(RowKind.PREFILL, np.append(prompt, token))
        taps = forced.run(row, ["logits", "mtp_logits"]).taps
        config = SlotConfig(HOT, seed, (), prompt, [token])
        assert draft == sampled(tiny, taps["mtp_logits"][-1], config, 21)
        agreed += draft == sampled(tiny, taps["logits"][-1], config, 21)
    assert agreed < 12


def first_drafts(driver: Driver, sampling: SamplingParams, depth: int) -> list[list[int]]:
    """The drafts after each of twelve prompts."""
    found = []
    for seed in range(12):
        stream = driver.begin(0, sampling=sampling, seed=seed)
        row = stream.row(RowKind.LAST, IDS[seed : seed + 20], propose=depth)
        found.append(stream.run(row).rows[0].drafts)
    return found


def test_the_record_says_what_was_drafted(tiny: Driver) -> None:
    for seed, drafts in enumerate(first_drafts(tiny, HOT, 7)):
        stream = tiny.begin(0, sampling=HOT, seed=seed)
        stream.last(IDS[seed : seed + 20], propose=7)
        assert drafts == drafted(tiny, stream, 7)


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_a_chain_ends_where_two_drafts_are_close(tiny: Driver, sampling: SamplingParams) -> None:
    """A margin cuts chains and changes nothing before the cut; a great one leaves those ids that
    are the only candidate."""
    spec = tiny_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "mixed")
    whole = first_drafts(tiny, sampling, 5)
    lengths = []
    for margin in (0.0, 0.1, 0.5, 1e5):
        with Driver(spec, tensors, draft_margin=margin) as driver:
            cut = first_drafts(driver, sampling, 5)
        for some, all_ in zip(cut, whole, strict=True):
            assert some == all_[: len(some)]
        lengths.append(sum(map(len, cut)))
    assert lengths[0] == 60 > lengths[1] > lengths[2] > lengths[3]
    assert lengths[3] == 0 or sampling is HOT


def test_the_margin_is_that_of_the_two_best_logits(tiny: Driver) -> None:
    spec = tiny_spec()
    margin = 0.3
    with Driver(spec, tiny_tensors(spec, tiny_arrays(spec), "mixed"), draft_margin=margin) as cut:
        kept = first_drafts(cut, GREEDY, 1)
    for seed, drafts in enumerate(kept):
        stream = tiny.begin(0)
        token = stream.last(IDS[seed : seed + 20])
        forced = tiny.begin(1)
        row = forced.row(RowKind.PREFILL, np.append(IDS[seed : seed + 20], token))
        logits = forced.run(row, ["mtp_logits"]).taps["mtp_logits"][-1][: spec.token_limit]
        second, first = np.sort(logits)[-2:]
        assert bool(drafts) == (first - second >= margin)
    assert 0 < sum(map(len, kept)) < 12


@each_sampling
def test_a_cap_of_the_draft_vocabulary(tiny: Driver, sampling: SamplingParams) -> None:
    """Ids from the cap on are not drafted; of the others the one that the sampler would choose if
    there were no more is, and what is sampled stays the same."""
    spec, cap = tiny_spec(), 100
    with Driver(spec, tiny_tensors(spec, tiny_arrays(spec), "mixed"), draft_vocab=cap) as driver:
        for seed in range(8):
            prompt = IDS[seed : seed + 20]
            stream = driver.begin(0, sampling=sampling, seed=seed, prompt_ids=prompt)
            done = stream.run(stream.row(RowKind.LAST, prompt, propose=4)).rows[0]
            assert max(done.drafts) < cap
            plain = tiny.begin(0, sampling=sampling, seed=seed, prompt_ids=prompt)
            assert done.tokens == [plain.last(prompt)]
            forced = driver.begin(1)
            row = forced.row(RowKind.PREFILL, np.append(prompt, done.tokens))
            logits = forced.run(row, ["mtp_logits"]).taps["mtp_logits"][-1].copy()
            logits[cap:] = -np.inf
            config = SlotConfig(sampling, seed, (), prompt, done.tokens)
            assert done.drafts[0] == sampled(driver, logits, config, 21)


def test_a_draft_head_that_fails_spoils_nothing() -> None:
    spec = tiny_spec()
    arrays = tiny_arrays(spec)
    good = tiny_tensors(spec, arrays, "f32")
    arrays["mtp.norm.weight"] = np.full_like(arrays["mtp.norm.weight"], np.nan)
    with Driver(spec, good) as plain, Driver(spec, tiny_tensors(spec, arrays, "f32")) as driver:
        expected, stream = plain.begin(0), driver.begin(0)
        ids = [expected.last(IDS[:20]), *expected.decode(4)]
        done = stream.run(stream.row(RowKind.LAST, IDS[:20], propose=3)).rows[0]
        assert (done.flags, done.tokens, done.drafts) == (lib.KSL_DONE_BAD_DRAFT, ids[:1], [])
        done = stream.verify(-1, ids[1:3], propose=1)
        assert (done.flags, done.tokens) == (lib.KSL_DONE_BAD_DRAFT, ids[1:4])
        assert stream.decode(1) == ids[4:]


def test_drafts_count_the_drafts_before_them(tiny: Driver) -> None:
    """A bias makes one id better than all others until it was used often enough."""
    for penalty in (0.0, 2.0):
        sampling = SamplingParams(
            temperature=0.0,
            frequency_penalty=penalty,
            logit_bias=((0, 60.0), *((i, 40.0) for i in range(1, 9))),
        )
        stream = tiny.begin(0, sampling=sampling)
        assert stream.last(IDS[:20], propose=16) == 0
        drafts = drafted(tiny, stream, 16)
        assert drafts[:3] == [0, 0, 0]
        assert (set(drafts) == {0}) == (penalty == 0)


@each_path
@pytest.mark.parametrize("n", [15, 16, 17, 47, 48, 64])
def test_drafts_after_adoption(engines: Engines, isa: str, n: int) -> None:
    """A prefix kept by SAVE and LOAD drafts what a cold prefill drafts, for two adopters that go on
    differently and share the prefix's full blocks; also where the prefix ends with a block."""
    driver = engines.get(isa, "bf16")
    donor = driver.begin(0, sampling=HOT)
    donor.prefill(IDS[:n])
    state = driver.slab_image(0)
    tail = driver.block_image(donor.blocks[n // 16]) if n % 16 else None
    adopters = []
    for slot, then in ((1, 3), (2, 77)):
        adopter = driver.begin(slot, sampling=HOT)
        adopter.share(donor.blocks[: n // 16])
        adopter.position = n
        ops = [StateOp(OpKind.LOAD_SLAB, adopter.slab, data=state.copy())]
        if tail is not None:
            ops.append(StateOp(OpKind.LOAD_BLOCK, adopter.blocks[n // 16], data=tail.copy()))
        driver.wave(before=ops)
        adopters.append((adopter, then))
    for adopter, then in adopters:
        cold = driver.begin(3, sampling=HOT)
        cold.prefill(IDS[:n])
        assert adopter.images() == cold.images()
        assert adopter.last([then], propose=4) == cold.last([then], propose=4)
        assert drafted(driver, adopter, 4) == drafted(driver, cold, 4)
        assert adopter.decode(6) == cold.decode(6)
        assert adopter.images() == cold.images()


def test_a_stop_id_ends_the_run(tiny: Driver) -> None:
    """A sampled stop id latches the slot: later drafts do not count, though they agree."""
    plain, first = prompted(tiny, 0, HOT)
    expected = [plain.last([first]), *plain.decode(11)]
    stop = next(i for i in range(3, 12) if expected[i] not in expected[:i])
    spec, first = prompted(tiny, 1, HOT, stop_ids=(198, expected[stop]))
    row = spec.verify(first, expected[:11])
    assert row.flags == lib.KSL_DONE_STOP
    assert row.tokens == expected[: stop + 1]
    assert row.accepted == stop
    assert row.position == 29 + stop + 1
    before = spec.images()
    later = spec.verify(5, expected[:4])
    assert later.flags == lib.KSL_DONE_LATCHED
    assert (later.tokens, later.accepted, later.proposed) == ([], 0, 0)
    assert spec.images() == before
    again, first = prompted(tiny, 2, HOT)
    again.last([first])
    again.decode(stop)
    assert again.images() == before


def test_drafting_ends_at_a_stop_id(tiny: Driver) -> None:
    stream = tiny.begin(0)
    stream.last(IDS[:20], propose=6)
    drafts = drafted(tiny, stream, 6)
    stop = next(i for i in range(1, 6) if drafts[i] not in drafts[:i])
    stream = tiny.begin(0, stop_ids=(drafts[stop],))
    done = stream.run(stream.row(RowKind.LAST, IDS[:20], propose=6)).rows[0]
    assert done.proposed == (0 if done.flags else stop + 1)


def test_drafts_end_with_the_row_after_them(tiny: Driver) -> None:
    """A row that is no VERIFY row spends the drafts: they belong to one position."""
    stream = tiny.begin(0)
    stream.last(IDS[:20], propose=4)
    stream.decode(1)
    done = stream.run(stream.row(RowKind.VERIFY, [-1], 5, draft=Draft.OWN)).rows[0]
    assert done.accepted == 0
    assert len(done.tokens) == 1


def test_a_masked_row_samples_one_position(tiny: Driver) -> None:
    """Drafts that the slot held before its mask are not used, and none are made."""
    stream = tiny.begin(0)
    stream.last(IDS[:20], propose=4)
    mask = np.zeros(-(-tiny.spec.vocab // 32), dtype=np.uint32)
    mask[3] = 1 << 7
    tiny.wave(before=[StateOp(OpKind.MASK, 0, data=mask)])
    row = stream.row(RowKind.VERIFY, [-1], 1, draft=Draft.OWN, propose=4)
    done = stream.run(row).rows[0]
    assert done.tokens == [3 * 32 + 7]
    assert done.proposed == 0
    tiny.wave(before=[StateOp(OpKind.MASK, 0, data=None)])
    assert stream.run(stream.row(RowKind.LAST, [-1], propose=4)).rows[0].proposed == 4


def test_forced_ids_are_verified_like_sampled_ones(tiny: Driver) -> None:
    stream = tiny.begin(0)
    stream.prefill(IDS[:20])
    ids = np.array([5, 6, 7, 8], dtype=np.int32)
    tiny.wave(before=[StateOp(OpKind.FORCE, 0, data=ids)])
    done = stream.verify(int(IDS[20]), [5, 6, 99, 8])
    assert (done.tokens, done.accepted) == ([5, 6, 7], 2)
    assert stream.last([-1], propose=3) == 8
    other = tiny.begin(1)
    other.prefill(np.concatenate([IDS[:21], ids[:3]]))
    assert stream.images() == other.images()


@each_path
def test_what_is_left_for_later_is_there_when_it_is_read(engines: Engines, isa: str) -> None:
    """MTP keys and values are made behind the records of a wave, unless it drafts, taps them or
    copies blocks behind its rows. Whoever looks finds the same."""
    driver = engines.get(isa, "bf16")
    size = driver.info.block_bytes

    def images(slot: int, how: str) -> list[bytes]:
        stream, first = prompted(driver, slot, GREEDY)
        found, token = [], first
        for step in range(8):
            taps = ("mtp_hidden",) if how == "tap" else ()
            image = np.zeros(size, np.uint8)
            block = stream.blocks[stream.position // driver.block_tokens]
            after = [StateOp(OpKind.SAVE_BLOCK, block, data=image)] if how == "after" else []
            drafts = [int(IDS[step]), 3] if step % 3 == 2 else []
            kind = RowKind.VERIFY if drafts else RowKind.LAST
            row = stream.row(
                kind, [token, *drafts], draft=Draft.GIVEN if drafts else Draft.NONE,
                propose=2 if how == "propose" else 0,
            )  # fmt: skip
            stream.position = driver.wave([row], taps=taps, after=after).rows[0].position
            token = -1
            if how != "after":
                # In the wave that follows at once, before its rows.
                driver.wave(before=[StateOp(OpKind.SAVE_BLOCK, block, data=image)])
            used = (stream.position - 1) % driver.block_tokens + 1
            keys, values = np.split(image.reshape(kv_layers, -1)[-1], 2)
            sides = [side.reshape(driver.block_tokens, -1)[:used] for side in (keys, values)]
            found.append(b"".join(side.tobytes() for side in sides))
        assert len(set(found)) > 1
        return found

    kv_layers = sum(kind == "full" for kind in driver.spec.layer_kinds) + driver.spec.mtp_layers
    later = images(0, "later")
    for slot, how in enumerate(("tap", "after", "propose"), start=1):
        assert images(slot, how) == later
