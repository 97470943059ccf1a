"""The determinism contract: state and output depend on the tokens alone, bit for bit. Not on row
lengths, neighbours in the wave, threads, or whether a prefix was prompt or output."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kslserve.core.sampling import SamplingParams
from kslserve.engine.budget import KV_FORMATS
from kslserve.engine.types import Draft, OpKind, Row, RowKind, StateOp
from tests.native.conftest import Engines
from tests.native.driver import ISA_PATHS, Driver
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors, wide_spec

HOT = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, repetition_penalty=1.1)
IDS = np.random.default_rng(5).integers(0, 199, 240).astype(np.int32)

each_path = pytest.mark.parametrize("isa", ISA_PATHS)
# Both arithmetics of weights and of attention; every KV format.
each_form = pytest.mark.parametrize(
    ("kv", "arithmetic"), [("f32", "float"), *((kv, "auto") for kv in KV_FORMATS)]
)
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@each_path
@each_form
@few
@given(n=st.integers(1, 150), plan=st.lists(st.integers(1, 70), max_size=6))
def test_any_chunking(
    engines: Engines, isa: str, kv: str, arithmetic: str, n: int, plan: list[int]
) -> None:
    driver = engines.get(isa, kv, activations=arithmetic)
    whole, parts = driver.begin(0, sampling=HOT), driver.begin(1, sampling=HOT)
    whole.prefill(IDS[:n])
    parts.prefill(IDS[:n], plan)
    assert whole.images() == parts.images()
    assert whole.last(IDS[n : n + 1]) == parts.last(IDS[n : n + 1])


@each_path
@each_form
def test_token_by_token(engines: Engines, isa: str, kv: str, arithmetic: str) -> None:
    driver = engines.get(isa, kv, activations=arithmetic)
    whole, single = driver.begin(0), driver.begin(1)
    whole.prefill(IDS[:90])
    single.prefill(IDS[:90], [1] * 90)
    assert whole.images() == single.images()


@each_path
@each_form
def test_output_as_prompt(engines: Engines, isa: str, kv: str, arithmetic: str) -> None:
    driver = engines.get(isa, kv, activations=arithmetic)
    made = driver.begin(0, sampling=HOT, seed=3)
    out = [made.last(IDS[:40]), *made.decode(50)]
    assert len(set(out)) > 20
    given_back = driver.begin(1)
    given_back.prefill(np.append(IDS[:40], out[:-1]).astype(np.int32))
    assert made.images() == given_back.images()


SCHEDULES = st.lists(
    st.lists(st.one_of(st.none(), st.integers(1, 24)), min_size=4, max_size=4),
    min_size=1,
    max_size=8,
)


@each_path
@each_form
@few
@given(schedule=SCHEDULES)
def test_any_batch_mix(
    engines: Engines, isa: str, kv: str, arithmetic: str, schedule: list[list[int | None]]
) -> None:
    """Four sequences advance by drawn prompt chunks or sit a wave out, then decode together; each
    alone ends in the same state with the same ids."""
    driver = engines.get(isa, kv, activations=arithmetic)
    prompts = [np.roll(IDS, 31 * i)[:60] for i in range(4)]
    streams = [driver.begin(i, sampling=HOT, seed=i) for i in range(4)]
    out: list[list[int]] = [[] for _ in streams]

    def run(lengths: list[int | None]) -> None:
        rows: list[Row] = []
        owners = []
        for i, (stream, n) in enumerate(zip(streams, lengths, strict=True)):
            rest = len(prompts[i]) - stream.position
            if n is None:
                continue
            if rest > n:
                ids = prompts[i][stream.position : stream.position + n]
                rows.append(stream.row(RowKind.PREFILL, ids))
            elif rest > 0:
                rows.append(stream.row(RowKind.LAST, prompts[i][stream.position :]))
            else:
                rows.append(stream.row(RowKind.LAST, [-1]))
            owners.append(i)
        for i, row in zip(owners, driver.wave(rows).rows, strict=True):
            streams[i].position = row.position
            out[i] += row.tokens

    for lengths in schedule:
        run(lengths)
    for _ in range(12):
        run([20] * 4)

    for i, stream in enumerate(streams):
        alone = driver.begin(4, sampling=HOT, seed=i)
        ids = [alone.last(prompts[i]), *alone.decode(len(out[i]) - 1)]
        assert ids == out[i]
        assert alone.images() == stream.images()


@each_path
@each_form
@settings(few, max_examples=6)
@given(n=st.integers(17, 150), seed=st.integers(0, 2**32 - 1), waves=st.integers(1, 4))
def test_loaded_in_parts(
    engines: Engines, isa: str, kv: str, arithmetic: str, n: int, seed: int, waves: int
) -> None:
    """Images of blocks come in pieces, in any order, before and after the rows of a neighbour, into
    blocks that held and read something else: what goes on from them is what they were saved of."""
    rng = np.random.default_rng(seed)
    driver = engines.get(isa, kv, activations=arithmetic)
    whole, loaded, other = (driver.begin(slot, sampling=HOT) for slot in range(3))
    whole.prefill(IDS[:n])
    loaded.prefill(IDS[80:], [75])  # read once, so nothing of it is left to be encoded
    blocks = -(-n // driver.block_tokens)
    pieces = []
    for source, target in zip(whole.blocks[:blocks], loaded.blocks, strict=False):
        image = driver.block_image(source)
        cuts = [0, *np.sort(rng.integers(1, image.size, 2)).tolist(), image.size]
        pieces += [
            StateOp(OpKind.LOAD_BLOCK, target, begin, image[begin:end].copy())
            for begin, end in pairwise(cuts)
            if begin < end
        ]
    order = rng.permutation(len(pieces))
    other.last(IDS[:5])
    for part in np.array_split(order, waves):
        ops = [pieces[i] for i in part]
        middle = int(rng.integers(0, len(ops) + 1))
        row = other.row(RowKind.LAST, [-1])
        done = driver.wave([row], before=ops[:middle], after=ops[middle:])
        other.position = done.rows[0].position
    state = driver.slab_image(whole.slab)
    driver.wave(before=[StateOp(OpKind.LOAD_SLAB, loaded.slab, data=state)])
    loaded.position = n
    found = []
    for stream in (whole, loaded):
        wave = stream.run(stream.row(RowKind.LAST, IDS[n : n + 9]), ["logits"])
        found.append((wave.taps["logits"].tobytes(), stream.decode(3), stream.images()))
    assert found[0] == found[1]


@each_path
@each_form
def test_any_number_of_threads(engines: Engines, isa: str, kv: str, arithmetic: str) -> None:
    """With test hooks every stage is split, however small."""
    results = []
    for threads in (1, 2, 3):
        driver = engines.get(isa, kv, threads, arithmetic)
        assert driver.info.threads == threads
        streams = [driver.begin(i, sampling=HOT, seed=i) for i in range(3)]
        rows = [
            streams[0].row(RowKind.PREFILL, IDS[:110]),
            streams[1].row(RowKind.LAST, IDS[100:149], propose=4),
            streams[2].row(RowKind.LAST, IDS[:1]),
        ]
        wave = driver.wave(rows, taps=["logits", "mtp_logits"])
        for stream, row in zip(streams, wave.rows, strict=True):
            stream.position = row.position
        rows = [
            streams[0].row(RowKind.PREFILL, IDS[110:120]),
            streams[1].row(RowKind.VERIFY, [-1], 5, draft=Draft.OWN),
            streams[2].row(RowKind.VERIFY, [-1, 5, 6, 7], draft=Draft.GIVEN),
        ]
        verified = driver.wave(rows)
        for stream, row in zip(streams, verified.rows, strict=True):
            stream.position = row.position
        results.append(
            (
                [row.tokens for row in (*wave.rows, *verified.rows)],
                wave.taps["logits"].tobytes(),
                wave.taps["mtp_logits"].tobytes(),
                [stream.images() for stream in streams],
            )
        )
    assert results[0] == results[1] == results[2]


@each_path
@pytest.mark.parametrize(
    ("kv", "arithmetic"),
    [
        ("bf16", "float"),
        *((kv, "auto") for kv in ("bf16", "fp8", "q4", "int8_g64", "int8ring_int4")),
    ],
)
def test_one_query_over_many_keys(isa: str, kv: str, arithmetic: str) -> None:
    """Decode deep into a context: with threads the tiles of one query are shared out, and combined
    in order like those of a prompt row."""
    spec = tiny_spec() if arithmetic == "float" else wide_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "f32")
    ids = np.random.default_rng(6).integers(0, 199, 1501).astype(np.int32)
    results = []
    for threads, plan in ((1, [500, 500]), (3, [512, 512, 476])):
        with Driver(
            spec, tensors, isa=isa, kv=kv, activations=arithmetic, threads=threads, slots=1,
            blocks=96, blocks_per_slot=96, wave_columns=512,
        ) as driver:  # fmt: skip
            stream = driver.begin(0)
            stream.prefill(ids[: sum(plan)], plan)
            rest = ids[stream.position :]
            wave = stream.run(stream.row(RowKind.LAST, rest), ["logits", "layers.1.attn_pregate"])
            results.append([tap[-1].tobytes() for tap in wave.taps.values()])
    assert len(rest) == 1
    assert results[0] == results[1]
