"""Rows of every kind, state operations, masks and sampling on the device: equalities are to the
bit, in waves of at most 64 columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from _kslserve import lib

from kslserve.core.sampling import SamplingParams
from kslserve.engine.sampling import reference_sample
from kslserve.engine.types import Draft, OpKind, RowKind, SlotConfig, StateOp
from tests.device.conftest import Opener
from tests.device.shapes import arrays_of, spec_named, tensors_of
from tests.native.driver import GREEDY, Driver, Stream
from tests.tiny import tiny_tensors

pytestmark = pytest.mark.cuda

IDS = np.random.default_rng(9).integers(0, 199, 200).astype(np.int32)
HOT = SamplingParams(
    temperature=1.0,
    top_k=60,
    top_p=0.97,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=1),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.4),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=50),
    SamplingParams(temperature=1.5, min_p=0.05),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1, top_k=100),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.7),
    SamplingParams(temperature=1.0, logit_bias=((3, 5.0), (7, -100.0), (11, 2.0))),
    HOT,
]


@pytest.fixture(params=["mixed", "e2m3", "nvfp4", "bf16"])
def driver(request: pytest.FixtureRequest, opened: Opener) -> Driver:
    spec = spec_named("round")
    kv = {"mixed": "f32", "e2m3": "q4", "nvfp4": "fp8", "bf16": "bf16"}[request.param]
    tensors = tensors_of(spec, request.param)
    # bf16 weights are packed unless float32 activations are asked for.
    activations = "auto" if request.param == "bf16" else "float"
    return opened(spec, tensors, kv=kv, activations=activations)


def images(stream: Stream, positions: int | None = None) -> list[bytes]:
    driver = stream.driver
    n = stream.position if positions is None else positions
    blocks = [driver.block_image(b).tobytes() for b in stream.blocks[: n // 16]]
    return [driver.slab_image(stream.slab).tobytes(), *blocks]


def test_whole_split_and_decode_made(driver: Driver) -> None:
    whole = driver.begin(0)
    whole.prefill(IDS[:112], [64])
    for slot, plan in enumerate(([1] * 112, [40, 40], [3, 9, 33, 30]), 1):
        split = driver.begin(slot)
        split.prefill(IDS[:112], plan)
        assert images(split) == images(whole), plan


@pytest.mark.parametrize("policy", ["mixed", "e2m3", "nvfp4", "bf16"])
def test_sums_of_slices(opened: Opener, policy: str) -> None:
    """Blocks of few tokens join slices that those of many leave for a reader, who adds them two by
    two: the same bits."""
    spec = spec_named("sliced")
    driver = opened(spec, tensors_of(spec, policy))
    whole = driver.begin(0)
    whole.prefill(IDS[:64])
    plans = ([1] * 64, [2] * 32, [8, 3, 1, 9, 4, 2, 1, 5, 7] * 2, [17, 32, 15], [12, 20, 32])
    for slot, plan in enumerate(plans, 1):
        split = driver.begin(slot)
        split.prefill(IDS[:64], plan)
        assert images(split) == images(whole), plan


@pytest.mark.parametrize("columns", [63, 300])
@pytest.mark.parametrize("kv", ["q4", "fp8", "bf16"])
def test_short_rows_of_full_heads(opened: Opener, kv: str, columns: int) -> None:
    """Decode, short rows and VERIFY at the heads of the 27B: the same bits, whatever shares a wave
    of at most 64 columns whose prompt rows have at most 63, in engines that take others too."""
    spec = spec_named("27b-heads")
    tensors = tensors_of(spec, "nvfp4")
    driver = opened(spec, tensors, kv=kv, wave_columns=columns)
    plain = driver.begin(0)
    plain.prefill(IDS[:60], [1] * 59)
    expected = [plain.last(IDS[60:61]), *plain.decode(20)]
    other = driver.begin(1)
    rows = [other.row(RowKind.PREFILL, IDS[:37]), driver.begin(2).row(RowKind.PREFILL, IDS[7:27])]
    other.position = driver.wave(rows).rows[0].position
    other.prefill(IDS[37:60], [9])
    drafts = [*expected[:9], (expected[9] + 1) % 199]
    row = other.verify(int(IDS[60]), drafts)
    assert row.tokens == expected[:10]
    again = driver.begin(3)
    again.prefill(IDS[:61])
    again.last(np.array(expected[:1], np.int32))
    again.decode(8)
    assert images(other) == images(again)


@pytest.mark.parametrize("n", [1, 4, 7, 9])
def test_rows_of_one_token(opened: Opener, n: int) -> None:
    """Rows of one token each, so few or many that their states lie in registers or in shared
    memory: the bits of longer rows, in slabs, in cuts and after VERIFY."""
    spec = spec_named("27b-heads")
    tensors = tensors_of(spec, "nvfp4")
    driver = opened(spec, tensors, slots=10, slabs=11, blocks=160)
    streams = [driver.begin(slot) for slot in range(n)]
    for stream in streams:
        stream.prefill(IDS[stream.slot :][:20])

    def step(kind: RowKind, cuts: tuple[tuple[int, int], ...] = ()) -> None:
        rows = [
            s.row(kind, IDS[s.slot + s.position :][:1], cuts=cuts if s is streams[-1] else ())
            for s in streams
        ]
        for stream, row in zip(streams, driver.wave(rows).rows, strict=True):
            stream.position = row.position

    step(RowKind.PREFILL)
    step(RowKind.PREFILL, cuts=((1, 10),))
    cut = driver.slab_image(10).tobytes()
    step(RowKind.VERIFY)
    step(RowKind.PREFILL)
    for stream in streams:
        again = driver.begin(9)
        again.prefill(IDS[stream.slot :][:24], [22])
        assert images(stream) == images(again)
    again = driver.begin(9)
    again.prefill(IDS[streams[-1].slot :][:22])
    assert cut == driver.slab_image(again.slab).tobytes()


@pytest.mark.parametrize("kv", ["q4", "f32"])
@pytest.mark.parametrize("shape", ["27b-heads", "round"])
def test_waves_of_one_shape_again(opened: Opener, shape: str, kv: str) -> None:
    """VERIFY and decode rows and drafts beside each other, in waves that are filled up to a shape
    and come often enough to be captured: what one sequence at a time gives."""
    spec = spec_named(shape)
    driver = opened(spec, tensors_of(spec, "nvfp4"), kv=kv, wave_columns=60)
    plain = [driver.begin(slot, sampling=HOT, seed=slot) for slot in range(3)]
    expected = [[s.last(IDS[s.slot : s.slot + 9]), *s.decode(60)] for s in plain]
    streams = [driver.begin(slot, sampling=HOT, seed=slot) for slot in range(3)]
    found = [[s.last(IDS[s.slot : s.slot + 9], propose=2)] for s in streams]
    for turn in range(12):
        rows = [streams[0].row(RowKind.LAST, [-1], propose=1 + turn % 2)]
        for stream, known, out, right in zip(
            streams[1:], expected[1:], found[1:], (turn % 4, 3), strict=True
        ):
            at = len(out)
            drafts = [*known[at : at + right], (known[at + right] + 1) % 199]
            row = stream.row(RowKind.VERIFY, [-1, *drafts], draft=Draft.GIVEN, propose=3)
            rows.append(row)
        done = driver.wave(rows).rows
        for stream, out, row in zip(streams, found, done, strict=True):
            assert row.proposed > 0
            stream.position = row.position
            out += row.tokens
    for slot, (stream, out) in enumerate(zip(streams, found, strict=True)):
        assert out == expected[slot][: len(out)]
        again = driver.begin(4, sampling=HOT, seed=slot)
        again.last(IDS[slot : slot + 9])
        again.decode(len(out) - 1)
        assert images(stream) == images(again)


@pytest.mark.parametrize("kv", ["q4", "f32"])
def test_waves_of_one_shape_behind_other_keys(opened: Opener, kv: str) -> None:
    """Graphs are launched with enough chunks of keys, updated for more of them and for fewer: the
    bits of waves that are launched kernel by kernel."""
    spec = spec_named("27b-heads")
    tensors = tensors_of(spec, "nvfp4")
    driver = opened(spec, tensors, kv=kv, blocks=6 * 132, blocks_per_slot=132)
    lengths = (20, 2000, 700)
    streams = []
    for watched in (0, 3):
        for index, length in enumerate(lengths):
            streams.append(driver.begin(watched + index, sampling=HOT))
            streams[-1].prefill(np.resize(IDS, length), [63] * (length // 63))
    for number in (0, 1, 2, 0, 1):
        free, watched = streams[number], streams[3 + number]
        for turn in range(40):
            token = [-1] if turn else IDS[number : number + 1]
            found = free.run(free.row(RowKind.LAST, token))
            right = watched.run(watched.row(RowKind.LAST, token), taps=["logits"])
            assert found.rows[0].tokens == right.rows[0].tokens, (number, turn)
        assert free.images() == watched.images()


def test_batch_is_singles(driver: Driver) -> None:
    lengths = (1, 7, 33, 23)
    alone = []
    for slot, n in enumerate(lengths):
        stream = driver.begin(slot, sampling=HOT, seed=slot)
        alone.append([stream.last(IDS[slot : slot + n]), *stream.decode(6)])
    streams = [driver.begin(slot, sampling=HOT, seed=slot) for slot in range(len(lengths))]
    rows = [
        s.row(RowKind.LAST, IDS[s.slot : s.slot + n]) for s, n in zip(streams, lengths, strict=True)
    ]
    found: list[list[int]] = [[] for _ in lengths]
    for _ in range(7):
        for stream, out, row in zip(streams, found, driver.wave(rows).rows, strict=True):
            out += row.tokens
            stream.position = row.position
        rows = [s.row(RowKind.LAST, [-1]) for s in streams]
    assert found == alone


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_given_drafts(driver: Driver, sampling: SamplingParams) -> None:
    plain = driver.begin(0, sampling=sampling, prompt_ids=IDS[:30])
    expected = [plain.last(IDS[:30]), *plain.decode(70)]
    for right, wrong in ((16, 0), (3, 5), (0, 4), (7, 1)):
        stream = driver.begin(1, sampling=sampling, prompt_ids=IDS[:30])
        stream.prefill(IDS[:29])
        token, out = int(IDS[29]), []
        while len(out) < 40:
            known = expected[len(out) :]
            drafts = known[:right] + [(t + 1) % 199 for t in known[right : right + wrong]]
            row = stream.verify(token, drafts)
            assert row.accepted == right
            out += row.tokens
            token = -1
        assert out == expected[: len(out)]
        again = driver.begin(2, sampling=sampling, prompt_ids=IDS[:30])
        again.last(IDS[:30])
        again.decode(len(out) - 1)
        assert images(stream) == images(again)
        assert stream.decode(3) == expected[len(out) : len(out) + 3]


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_own_drafts(driver: Driver, sampling: SamplingParams) -> None:
    plain = driver.begin(0, sampling=sampling)
    stream = driver.begin(1, sampling=sampling)
    row = stream.run(stream.row(RowKind.LAST, IDS[:30], propose=5)).rows[0]
    out = list(row.tokens)
    for depth in (5, 3, 16, 0, 1, 5, 16, 4):
        done = stream.run(
            stream.row(RowKind.VERIFY, [-1], 17, draft=Draft.OWN, propose=depth)
        ).rows[0]
        assert done.proposed == depth
        out += done.tokens
    assert [plain.last(IDS[:30]), *plain.decode(len(out) - 1)] == out
    assert images(plain) == images(stream)


def test_drafts_are_those_of_the_reference(opened: Opener) -> None:
    """The ids that MTP drafts, seen through the embeddings of a VERIFY row."""
    spec = spec_named("round")
    tensors = tensors_of(spec, "f32")
    found = []
    for on in ("cuda", "cpu"):
        stream = opened(spec, tensors, on=on).begin(0)
        stream.run(stream.row(RowKind.LAST, IDS[:40], propose=9))
        row = stream.row(RowKind.VERIFY, [-1], 10, draft=Draft.OWN)
        found.append(stream.run(row, ["embed"]).taps["embed"].copy())
    assert found[0].shape == (10, spec.hidden)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_margin_and_cap_of_drafts_are_those_of_the_reference(
    opened: Opener, sampling: SamplingParams
) -> None:
    """float32 weights: the scores differ in their last bits only, the chains not at all."""
    spec = spec_named("round")
    tensors = tensors_of(spec, "f32")
    found = []
    for on in ("cuda", "cpu"):
        chains = []
        for options in ({"draft_margin": 0.3}, {"draft_margin": 1.5}, {"draft_vocab": 300}):
            driver = opened(spec, tensors, on=on, **options)
            for seed in range(6):
                stream = driver.begin(0, sampling=sampling, seed=seed)
                row = stream.row(RowKind.LAST, IDS[seed : seed + 30], propose=6)
                chains.append(stream.run(row).rows[0].drafts)
        found.append(chains)
    assert found[0] == found[1]
    lengths = [sum(map(len, found[0][i : i + 6])) for i in (0, 6, 12)]
    assert 36 > lengths[0] > lengths[1]
    assert max(token for chain in found[0][12:] for token in chain) < 300


def test_cuts_copies_and_images(driver: Driver) -> None:
    stream = driver.begin(0)
    row = stream.row(RowKind.PREFILL, IDS[:64], cuts=((1, 6), (30, 7), (64, 8)))
    stream.run(row)
    for offset, slab in ((1, 6), (30, 7), (64, 8)):
        plain = driver.begin(1)
        plain.prefill(IDS[:offset])
        assert driver.slab_image(slab).tobytes() == driver.slab_image(1).tobytes(), offset
    image, block = driver.slab_image(8), driver.block_image(stream.blocks[0])
    driver.wave(
        before=[
            StateOp(OpKind.COPY_SLAB, 8, 9),
            StateOp(OpKind.COPY_BLOCK, stream.blocks[0], 90),
            StateOp(OpKind.LOAD_SLAB, 5, data=image),
            StateOp(OpKind.LOAD_BLOCK, 91, data=block),
            StateOp(OpKind.ZERO_SLAB, 8),
        ]
    )
    assert driver.slab_image(9).tobytes() == driver.slab_image(5).tobytes() == image.tobytes()
    assert driver.block_image(90).tobytes() == driver.block_image(91).tobytes() == block.tobytes()
    assert not driver.slab_image(8).any()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampler_is_the_reference(driver: Driver, sampling: SamplingParams) -> None:
    """The device's id is what the reference sampler draws from the device's logits."""
    for seed in range(3):
        stream = driver.begin(0, sampling=sampling, seed=seed, prompt_ids=IDS[:20])
        output: list[int] = []
        tokens: Any = IDS[:20]
        for _ in range(12):
            result = stream.run(stream.row(RowKind.LAST, tokens), ["logits"])
            expected = reference_sample(
                result.taps["logits"][-1], driver.spec.token_limit,
                SlotConfig(sampling, seed, (), IDS[:20], output), stream.position,
            )  # fmt: skip
            assert result.rows[0].tokens == [expected], (seed, len(output))
            output.append(expected)
            tokens = [-1]


@pytest.mark.parametrize("kinds", [1, 2])
def test_ties_and_masks(opened: Opener, kinds: int) -> None:
    """Equal logits: top_k and top_p keep the lower ids; also where more are equal than a list of
    candidates holds."""
    spec = spec_named("round")
    head = arrays_of(spec)["lm_head.weight"].copy()
    for kind in range(kinds):
        head[kind::kinds] = head[kind]
    arrays = {**arrays_of(spec), "lm_head.weight": head}
    driver = opened(spec, tiny_tensors(spec, arrays, "f32"))
    mask = np.zeros(-(-spec.vocab // 32), dtype=np.uint32)
    mask[3:20] = 0x5A5A5A5A
    for sampling in SAMPLINGS:
        for use in (None, mask):
            stream = driver.begin(0, sampling=sampling, seed=5)
            if use is not None:
                driver.wave(before=[StateOp(OpKind.MASK, 0, data=use)])
            result = stream.run(stream.row(RowKind.LAST, IDS[:3]), ["logits"])
            expected = reference_sample(
                result.taps["logits"][-1], spec.token_limit, SlotConfig(sampling, 5), 3, use
            )
            assert result.rows[0].tokens == [expected], sampling
            if use is not None:
                assert use[expected >> 5] >> (expected & 31) & 1


def test_scores_and_logprobs(driver: Driver) -> None:
    stream = driver.begin(0)
    tokens = np.append(IDS[:40], np.int32(-1)).astype(np.int32)
    row = stream.row(RowKind.SCORE, tokens, 40, top_n=20)
    result = stream.run(row, ["logits"])
    logits = result.taps["logits"].astype(np.float64)
    expected = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1))[:, None]
    expected -= logits.max(1, keepdims=True)
    entries = result.rows[0].logprobs
    assert entries is not None
    assert len(entries) == 40
    for i, (own, *top) in enumerate(entries):
        order = sorted(range(driver.spec.vocab), key=lambda t: (-logits[i, t], t))[:20]
        assert [t for t, _ in top] == order
        np.testing.assert_allclose([p for _, p in top], expected[i, order], atol=1e-5)
        assert own[0] == tokens[i + 1]
        if i < 39:
            assert abs(own[1] - expected[i, tokens[i + 1]]) < 1e-5
    last = stream.run(stream.row(RowKind.LAST, [5], top_n=3)).rows[0]
    assert last.logprobs is not None
    assert last.logprobs[0][0] == last.logprobs[0][1]
    assert last.logprobs[0][0][0] == last.tokens[0]


def test_stop_latch_and_forced_ids(driver: Driver) -> None:
    stream = driver.begin(0, stop_ids=(77,))
    driver.wave(before=[StateOp(OpKind.FORCE, 0, data=np.array([5, 77], dtype=np.int32))])
    assert stream.last(IDS[:9]) == 5
    row = stream.run(stream.row(RowKind.LAST, [-1])).rows[0]
    assert (row.tokens, row.flags) == ([77], lib.KSL_DONE_STOP)
    row = stream.run(stream.row(RowKind.LAST, [-1])).rows[0]
    assert (row.tokens, row.flags) == ([], lib.KSL_DONE_LATCHED)


def test_bad_logits_end_one_row(opened: Opener) -> None:
    spec = spec_named("tiny")
    embedding = arrays_of(spec)["model.embed_tokens.weight"].copy()
    embedding[7] = np.nan
    arrays = {**arrays_of(spec), "model.embed_tokens.weight": embedding}
    driver = opened(spec, tiny_tensors(spec, arrays, "f32"))
    bad, good = driver.begin(0), driver.begin(1)
    rows = driver.wave([bad.row(RowKind.LAST, [7]), good.row(RowKind.LAST, IDS[:5])]).rows
    assert rows[0].flags == lib.KSL_DONE_BAD_LOGITS
    assert (rows[1].flags, len(rows[1].tokens)) == (0, 1)
