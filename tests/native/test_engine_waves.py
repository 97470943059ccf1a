"""What rows and ops of a wave do: scores, log-probabilities, masks, stops, copies, cuts, errors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from _kslserve import ffi, lib

from kslserve.core.sampling import SamplingParams
from kslserve.engine.model import Fill, TensorArg
from kslserve.engine.types import OpKind, RowKind, StateOp
from tests.closeness import log_softmax, relative
from tests.native.conftest import Engines
from tests.native.driver import ISA_PATHS, Driver, Refused
from tests.reference import Reference
from tests.tiny import POLICIES, tiny_arrays, tiny_spec, tiny_tensors, tiny_values

IDS = np.random.default_rng(3).integers(0, 199, 200).astype(np.int32)
HOT = SamplingParams(temperature=1.0, top_p=0.9)


# ---- values against the numpy reference


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("isa", ISA_PATHS)
def test_logits_of_every_encoding(isa: str, policy: str) -> None:
    spec = tiny_spec()
    arrays = tiny_arrays(spec, tied=policy == "bf16")
    reference = Reference(spec, tiny_values(spec, arrays, policy))
    expected = reference.forward(IDS[:100])
    mtp_logits, mtp_hidden = reference.mtp(IDS[:100], expected["final_norm"])
    with Driver(spec, tiny_tensors(spec, arrays, policy), isa=isa) as driver:
        stream = driver.begin(0)
        row = stream.row(RowKind.PREFILL, IDS[:100])
        taps = stream.run(row, ["logits", "mtp_logits", "mtp_hidden", "layers.1.out"]).taps
        image = driver.slab_image(0).view("<f4")
    assert relative(taps["logits"], expected["logits"]) <= 1e-5
    assert relative(taps["layers.1.out"], expected["layers.1.out"]) <= 1e-5
    assert relative(taps["mtp_logits"][1:], mtp_logits) <= 1e-5
    assert relative(taps["mtp_hidden"][1:], mtp_hidden) <= 1e-5
    linear = [i for i, kind in enumerate(spec.layer_kinds) if kind == "linear"]
    state = np.concatenate(
        [expected[f"layers.{i}.S"].ravel() for i in linear]
        + [expected[f"layers.{i}.conv"].ravel() for i in linear]
        + [expected["final_norm"][-1]]
    )
    assert relative(image, state) <= 1e-5


@pytest.mark.parametrize("isa", ISA_PATHS)
def test_bf16_weights_take_rounded_activations(isa: str) -> None:
    """Where the machine has bf16 products: near the float path, equal in any chunks."""
    spec = tiny_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "bf16")
    ids = np.arange(3, 63, dtype=np.int32)
    logits = {}
    for activations in ("float", "auto"):
        with Driver(spec, tensors, isa=isa, activations=activations, threads=2) as driver:
            name = ffi.string(driver.info.activation).decode()
            whole, parts = driver.begin(0), driver.begin(1)
            logits[name] = whole.run(whole.row(RowKind.PREFILL, ids), ["logits"]).taps["logits"]
            parts.prefill(ids, [1, 2, 3, 5, 6, 7, 9])
            assert whole.images() == parts.images()
    if len(logits) == 1:
        pytest.skip("there are no bf16 products here")
    difference = logits["bf16"] - logits["float"]
    assert np.abs(difference).max() > 0
    assert np.linalg.norm(difference) < 0.02 * np.linalg.norm(logits["float"])


@pytest.mark.parametrize("kinds", [("linear", "linear"), ("full",)])
def test_models_of_one_layer_kind(kinds: tuple[str, ...]) -> None:
    """Without KV layers a block is empty, without linear layers a slab is the hidden column."""
    spec = replace(tiny_spec(mtp=False), layer_kinds=kinds)
    arrays = tiny_arrays(spec)
    exact = tiny_values(spec, arrays, "f32")
    expected = Reference(spec, exact).forward(IDS[:40])["logits"]
    with Driver(spec, tiny_tensors(spec, arrays, "f32"), threads=2) as driver:
        stream = driver.begin(0)
        stream.prefill(IDS[:30], [7])
        row = stream.row(RowKind.LAST, IDS[30:40])
        result = stream.run(row, ["logits", "mtp_logits"])
        assert relative(result.taps["logits"], expected[30:]) <= 1e-5
        assert result.taps["mtp_logits"].size == 0
        first = result.rows[0].tokens[0]
        plain = stream.decode(4)
        again = driver.begin(1)
        again.prefill(IDS[:40])
        assert again.verify(first, [*plain[:3], 0]).tokens == plain
        assert again.images() == stream.images()


def test_bf16_kv_is_close_to_f32(engines: Engines) -> None:
    logits = []
    for kv in ("f32", "bf16"):
        stream = engines.get(kv=kv, wide=True).begin(0)
        logits.append(stream.run(stream.row(RowKind.PREFILL, IDS[:90]), ["logits"]).taps["logits"])
    assert 1e-5 < relative(logits[1], logits[0]) < 1e-2


# ---- scores and log-probabilities


@pytest.mark.parametrize("n", [1, 33, 100])
def test_score_is_log_softmax(tiny: Driver, n: int) -> None:
    stream = tiny.begin(0)
    row = stream.row(RowKind.SCORE, IDS[: n + 1], n, top_n=5)
    result = stream.run(row, ["logits"])
    expected = log_softmax(result.taps["logits"])
    entries = result.rows[0].logprobs
    assert entries is not None
    assert len(entries) == n
    for i, (given, *top) in enumerate(entries):
        assert given[0] == IDS[i + 1]
        assert given[1] == pytest.approx(expected[i, IDS[i + 1]], abs=2e-6)
        best = np.argsort(-result.taps["logits"][i], kind="stable")[:5]
        assert [t for t, _ in top] == best.tolist()
        np.testing.assert_allclose([p for _, p in top], expected[i, best], atol=2e-6)
    assert result.rows[0].tokens == []
    other = tiny.begin(1)
    other.prefill(IDS[:n])
    assert stream.images() == other.images()


def test_score_with_an_unknown_end_and_in_pieces(tiny: Driver) -> None:
    whole = tiny.begin(0)
    row = whole.row(RowKind.SCORE, [*IDS[:60], -1], 60, top_n=2)
    entries = whole.run(row).rows[0].logprobs
    assert entries is not None
    assert entries[59][0] == (-1, 0.0)
    pieces = tiny.begin(1)
    found = []
    for at, n in ((0, 7), (7, 33), (40, 20)):
        ids = [*IDS[at : at + n], IDS[at + n] if at + n < 60 else -1]
        part = pieces.run(pieces.row(RowKind.SCORE, ids, n, top_n=2)).rows[0].logprobs
        assert part is not None
        found += part
    assert found == entries


def test_logprobs_of_sampled_ids(tiny: Driver) -> None:
    """By raw probability: penalties and temperature do not show."""
    sampling = SamplingParams(temperature=1.3, presence_penalty=1.5, logit_bias=((7, 3.0),))
    stream = tiny.begin(0, sampling=sampling)
    result = stream.run(stream.row(RowKind.LAST, IDS[:20], top_n=3), ["logits"])
    expected = log_softmax(result.taps["logits"][-1])
    (entry,) = result.rows[0].logprobs or []
    token = result.rows[0].tokens[0]
    assert entry[0] == (token, pytest.approx(expected[token], abs=2e-6))
    assert [t for t, _ in entry[1:]] == np.argsort(-expected, kind="stable")[:3].tolist()

    greedy = tiny.begin(1)
    first = greedy.last(IDS[:20])
    drafts = greedy.decode(4)
    stream = tiny.begin(2)
    stream.last(IDS[:20])
    row = stream.verify(first, [*drafts, 0], top_n=2)
    assert row.logprobs is not None
    assert [entry[0][0] for entry in row.logprobs] == row.tokens
    assert [entry[1][0] for entry in row.logprobs] == row.tokens  # greedy: the best is the sampled


# ---- sampling settings of a slot


def test_bias_and_padding_ids(tiny: Driver) -> None:
    stream = tiny.begin(0, sampling=SamplingParams(temperature=0.0, logit_bias=((123, 100.0),)))
    assert stream.last(IDS[:10]) == 123
    stream = tiny.begin(0, sampling=SamplingParams(temperature=0.0, logit_bias=((200, 100.0),)))
    assert stream.last(IDS[:10]) < tiny.spec.token_limit


def test_a_mask_lasts_until_it_is_cleared(tiny: Driver) -> None:
    free = tiny.begin(1)
    expected = [free.last(IDS[:10]), *free.decode(3)]
    stream = tiny.begin(0)
    stream.prefill(IDS[:9])
    mask = np.zeros(-(-tiny.spec.vocab // 32), dtype=np.uint32)
    for token in (4, 77):
        mask[token // 32] |= np.uint32(1 << token % 32)
    tiny.wave(before=[StateOp(OpKind.MASK, 0, data=mask)])
    assert stream.last(IDS[9:10]) in (4, 77)
    assert stream.decode(1)[0] in (4, 77)
    stream = tiny.begin(0)
    tiny.wave(before=[StateOp(OpKind.MASK, 0, data=mask), StateOp(OpKind.MASK, 0, data=None)])
    assert [stream.last(IDS[:10]), *stream.decode(3)] == expected


def test_nothing_left_to_sample_latches(tiny: Driver) -> None:
    stream = tiny.begin(0)
    mask = np.zeros(-(-tiny.spec.vocab // 32), dtype=np.uint32)
    mask[-1] = np.uint32(1 << tiny.spec.token_limit % 32)  # a padding id only
    tiny.wave(before=[StateOp(OpKind.MASK, 0, data=mask)])
    done = stream.run(stream.row(RowKind.LAST, IDS[:10])).rows[0]
    assert (done.flags, done.tokens, done.position) == (lib.KSL_DONE_BAD_LOGITS, [], 10)
    assert stream.run(stream.row(RowKind.LAST, [-1])).rows[0].flags == lib.KSL_DONE_LATCHED


@pytest.mark.parametrize("drafts", [(), (1, 2)])
def test_nan_logits_latch(drafts: tuple[int, ...]) -> None:
    spec = tiny_spec()
    arrays = tiny_arrays(spec)
    arrays["lm_head.weight"][50, 3] = np.nan
    with Driver(spec, tiny_tensors(spec, arrays, "f32")) as driver:
        stream = driver.begin(0)
        done = stream.verify(int(IDS[0]), drafts)
        assert (done.flags, done.tokens, done.position) == (lib.KSL_DONE_BAD_LOGITS, [], 1)
        other = driver.begin(1)
        other.prefill(IDS[:1])
        assert stream.images() == other.images()


def test_a_stop_id_latches_until_configured(tiny: Driver) -> None:
    plain = tiny.begin(0, sampling=HOT)
    ids = [plain.last(IDS[:10]), *plain.decode(8)]
    stop = next(i for i in range(2, 9) if ids[i] not in ids[:i])
    stream = tiny.begin(1, sampling=HOT, stop_ids=(ids[stop],))
    assert [stream.last(IDS[:10]), *stream.decode(8)] == ids[: stop + 1]
    before = stream.images()
    latched = stream.run(stream.row(RowKind.LAST, [-1])).rows[0]
    assert latched.flags == lib.KSL_DONE_LATCHED
    assert latched.tokens == []
    assert stream.images() == before
    again = tiny.begin(1, sampling=HOT)
    assert again.last(IDS[:10]) == ids[0]


def test_a_latched_row_beside_live_ones(tiny: Driver) -> None:
    """It takes no column, and disturbs nobody."""
    first = tiny.begin(0).last(IDS[:10])
    stopped = tiny.begin(0, stop_ids=(first,))
    stopped.last(IDS[:10])
    live, alone = tiny.begin(1), tiny.begin(2)
    rows = [stopped.row(RowKind.LAST, [-1]), live.row(RowKind.LAST, IDS[20:40])]
    result = tiny.wave(rows, taps=["final_norm"])
    assert [row.flags for row in result.rows] == [lib.KSL_DONE_LATCHED, 0]
    assert result.taps["final_norm"].size == 20 * tiny.spec.hidden
    assert result.rows[1].tokens == [alone.last(IDS[20:40])]


def test_a_resumed_sequence_counts_its_output(tiny: Driver) -> None:
    sampling = SamplingParams(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.3)
    plain = tiny.begin(0, sampling=sampling, prompt_ids=IDS[:10])
    ids = [plain.last(IDS[:10]), *plain.decode(19)]
    resumed = tiny.begin(1, sampling=sampling, prompt_ids=IDS[:10], output_ids=ids[:8])
    resumed.prefill(np.append(IDS[:10], ids[:7]).astype(np.int32))
    assert [resumed.last(ids[7:8]), *resumed.decode(11)] == ids[8:]


def test_forced_ids(tiny: Driver) -> None:
    stream = tiny.begin(0)
    ids = np.array([9, 8, 7], dtype=np.int32)
    tiny.wave(before=[StateOp(OpKind.FORCE, 0, data=ids)])
    out = [stream.last(IDS[:10]), *stream.decode(3)]
    assert out[:3] == [9, 8, 7]
    given = tiny.begin(1)
    assert given.last(np.concatenate([IDS[:10], ids])) == out[3]
    assert stream.images() == given.images()


# ---- state ops and cuts


def test_slab_and_block_copies(tiny: Driver) -> None:
    """A sequence goes on in another slot from COPY ops, and from images, as if nothing happened."""
    donor = tiny.begin(0, sampling=HOT)
    donor.prefill(IDS[:40])
    images = [tiny.block_image(block) for block in donor.blocks[:3]]
    state = tiny.slab_image(0)
    copied, loaded = tiny.begin(1, sampling=HOT), tiny.begin(2, sampling=HOT)
    pairs = list(zip(donor.blocks[:3], copied.blocks, strict=False))
    tiny.wave(
        before=[StateOp(OpKind.COPY_SLAB, 0, 1)]
        + [StateOp(OpKind.COPY_BLOCK, a, b) for a, b in pairs]
        + [StateOp(OpKind.LOAD_SLAB, 2, data=state)]
        + [
            StateOp(OpKind.LOAD_BLOCK, block, data=image)
            for block, image in zip(loaded.blocks, images, strict=False)
        ]
    )
    copied.position = loaded.position = 40
    expected = [donor.last(IDS[40:50]), *donor.decode(5)]
    for stream in (copied, loaded):
        assert [stream.last(IDS[40:50]), *stream.decode(5)] == expected
        assert stream.images() == donor.images()


def test_zero_slab_and_op_order(tiny: Driver) -> None:
    """Before ops see the state before the rows, after ops the state after them."""
    stream = tiny.begin(0)
    stream.prefill(IDS[:10])
    before, after = (np.zeros(tiny.info.slab_bytes, dtype=np.uint8) for _ in range(2))
    expected = tiny.slab_image(0)
    tiny.wave(
        [stream.row(RowKind.PREFILL, IDS[10:20])],
        before=[StateOp(OpKind.SAVE_SLAB, 0, data=before)],
        after=[StateOp(OpKind.SAVE_SLAB, 0, data=after), StateOp(OpKind.ZERO_SLAB, 0)],
    )
    assert before.tobytes() == expected.tobytes()
    assert not tiny.slab_image(0).any()
    other = tiny.begin(1)
    other.prefill(IDS[:20])
    assert after.tobytes() == tiny.slab_image(1).tobytes()


@pytest.mark.parametrize("kind", [RowKind.PREFILL, RowKind.LAST, RowKind.SCORE])
@pytest.mark.parametrize("start", [0, 1, 2, 30])
@pytest.mark.parametrize("offsets", [(1,), (2, 40), (1, 2, 3, 4), (5, 16, 39, 40)])
def test_cuts(tiny: Driver, kind: RowKind, start: int, offsets: tuple[int, ...]) -> None:
    """A cut slab is the state after a prompt of that length, its hidden column included."""
    stream = tiny.begin(0)
    stream.prefill(IDS[:start])
    cuts = tuple((offset, 6 + i) for i, offset in enumerate(offsets))
    extra = 1 if kind == RowKind.SCORE else 0
    row = stream.row(
        kind, IDS[start : start + 40 + extra], 40, cuts=cuts, top_n=0 if extra else None
    )
    stream.run(row)
    whole = tiny.begin(1)
    whole.prefill(IDS[: start + 40])
    assert stream.images() == whole.images()
    for offset, slab in cuts:
        part = tiny.begin(2)
        part.prefill(IDS[: start + offset])
        assert tiny.slab_image(slab).tobytes() == tiny.slab_image(2).tobytes()


def test_going_on_from_a_cut(tiny: Driver) -> None:
    """The adopter shares the full blocks below the cut and copies the one that it goes on in."""
    donor = tiny.begin(0)
    donor.run(donor.row(RowKind.PREFILL, IDS[:70], cuts=((37, 7),)))
    adopter = tiny.begin(1)
    adopter.share(donor.blocks[:2])
    tiny.wave(
        before=[
            StateOp(OpKind.COPY_SLAB, 7, 1),
            StateOp(OpKind.COPY_BLOCK, donor.blocks[2], adopter.blocks[2]),
        ]
    )
    adopter.position = 37
    cold = tiny.begin(2)
    cold.prefill(IDS[:37])
    assert adopter.images() == cold.images()
    assert [adopter.last(IDS[90:99]), *adopter.decode(9)] == [
        cold.last(IDS[90:99]),
        *cold.decode(9),
    ]
    assert adopter.images() == cold.images()
    rest = tiny.begin(3)
    rest.prefill(IDS[:70])
    assert donor.images() == rest.images()


def test_taps_in_column_order(tiny: Driver) -> None:
    streams = [tiny.begin(i) for i in range(2)]
    rows = [streams[0].row(RowKind.PREFILL, IDS[:5]), streams[1].row(RowKind.LAST, IDS[50:53])]
    taps = tiny.wave(rows, taps=["layers.3.out", "logits", "layers.1.gdn_q", "nonsense"]).taps
    assert taps["layers.1.gdn_q"].size == taps["nonsense"].size == 0  # layer 1 has no such tap
    for stream, ids, part in ((0, IDS[:5], slice(0, 5)), (1, IDS[50:53], slice(5, 8))):
        alone = tiny.begin(stream)
        row = alone.row(RowKind.PREFILL, ids)
        for name, tap in alone.run(row, ["layers.3.out", "logits"]).taps.items():
            assert tap.tobytes() == taps[name][part].tobytes()


def test_every_tap_of_the_program(tiny: Driver) -> None:
    names = {
        "linear": "in_norm gdn_qkv gdn_z gdn_b gdn_a gdn_conv_silu gdn_q gdn_k gdn_v gdn_g "
        "gdn_beta gdn_core gdn_normed mixer_out mid post_norm mlp_gate mlp_up mlp_act mlp_out out",
        "full": "in_norm attn_q attn_gate attn_k attn_v attn_pregate attn_gated mixer_out mid "
        "post_norm mlp_gate mlp_up mlp_act mlp_out out",
    }
    taps = ["embed", "final_norm", "logits", "mtp_input", "mtp_hidden", "mtp_logits"]
    for i, kind in enumerate((*tiny.spec.layer_kinds, "full")):
        prefix = "mtp.layers.0." if i == tiny.spec.layers else f"layers.{i}."
        taps += [prefix + name for name in names[kind].split()]
    stream = tiny.begin(0)
    found = stream.run(stream.row(RowKind.PREFILL, IDS[:3]), taps).taps
    for name, array in found.items():
        assert array.shape[0] == 3, name
        assert np.isfinite(array).all(), name
        assert array[1:].any(), name


# ---- opening


def open_again(tensors: list[TensorArg], **options: object) -> None:
    Driver(tiny_spec(), tensors, **options).close()  # type: ignore[arg-type]


def test_every_failing_allocation_is_an_error() -> None:
    spec = tiny_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "mixed")
    tensors[5] = TensorArg(
        tensors[5].name, 4, tensors[5].rows, tensors[5].cols, fill=Fill(1, 3, 0.1)
    )
    failures: list[tuple[int, str]] = []
    while len(failures) < 10_000:
        try:
            open_again(tensors, fail_alloc_at=len(failures) + 1, threads=2)
            break
        except Refused as refused:
            failures.append(refused.args)  # type: ignore[arg-type]
    assert 100 < len(failures) < 10_000
    assert {code for code, _ in failures} == {lib.KSL_NOMEM}
    assert all("memory" in text for _, text in failures)


@pytest.mark.parametrize("change", ["missing", "shape", "norm encoding"])
def test_wrong_tensors_are_named(change: str) -> None:
    spec = tiny_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "f32")
    index = next(i for i, t in enumerate(tensors) if t.name == "mtp.layers.0.mlp.up_proj.weight")
    old = tensors[index]
    if change == "missing":
        del tensors[index]
    elif change == "shape":
        data = bytes(old.rows * 4 * 4)
        tensors[index] = TensorArg(old.name, old.encoding, old.rows, 4, data)
    else:
        index = next(i for i, t in enumerate(tensors) if t.name == "model.norm.weight")
        old = tensors[index]
        tensors[index] = TensorArg(
            old.name, 2, old.rows, 1, bytes(old.rows), np.ones(1, dtype=np.float32)
        )
    with pytest.raises(Refused) as refused:
        open_again(tensors)
    assert refused.value.args[0] == lib.KSL_INVALID
    assert old.name in refused.value.args[1]


def fill_values(tensor: TensorArg) -> np.ndarray:
    """The fill's values before encoding: hash words of splitmix64 as odd multiples of 2^-24."""
    assert tensor.fill is not None
    shape = (tensor.rows, tensor.cols)
    if tensor.fill.kind == 2:
        return np.full(shape, tensor.fill.scale, dtype=np.float32)

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    index = np.arange(1, tensor.rows * tensor.cols + 1, dtype=np.uint64)
    key = mix(np.array([tensor.fill.seed], dtype=np.uint64))
    top = (mix(key + index * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)).astype(np.int64)
    unit = (2 * top + 1 - (1 << 24)).astype(np.float32) * np.float32(2.0**-24)
    return (np.float32(tensor.fill.scale) * unit).reshape(shape)


@pytest.mark.parametrize("policy", POLICIES)
def test_filled_tensors_are_encoded_like_given_ones(policy: str) -> None:
    """A fill of 203 rows (two stripes) gives the logits of the same values given as data."""
    spec = tiny_spec()
    given = tiny_tensors(spec, tiny_arrays(spec), policy)
    filled = []
    for i, tensor in enumerate(given):
        fill = Fill(1 if tensor.cols > 1 else 2, seed=i, scale=0.25)
        filled.append(TensorArg(tensor.name, tensor.encoding, tensor.rows, tensor.cols, fill=fill))
    arrays = {t.name: fill_values(t) for t in filled}
    shapes = tiny_arrays(spec)
    arrays = {name: array.reshape(shapes[name].shape) for name, array in arrays.items()}
    logits = []
    for tensors in (filled, tiny_tensors(spec, arrays, policy)):
        with Driver(spec, tensors) as driver:
            stream = driver.begin(0)
            row = stream.row(RowKind.PREFILL, IDS[:20])
            logits.append(stream.run(row, ["logits"]).taps["logits"])
    assert np.abs(logits[0]).max() > 0.1
    assert logits[0].tobytes() == logits[1].tobytes()


def test_info(tiny: Driver, engines: Engines) -> None:
    info, spec = tiny.info, tiny.spec
    state = 3 * (6 * 16 * 40 + 3 * (2 * 2 * 16 + 6 * 40)) + spec.hidden
    assert info.slab_bytes == 4 * state
    assert info.kv_token_bytes == 2 * 2 * 2 * 24 * 4
    assert info.block_bytes == 16 * info.kv_token_bytes
    wide = engines.get(wide=True).info
    assert engines.get(kv="bf16").info.block_bytes == wide.block_bytes // 2
    assert 0 < info.token_bytes < info.weight_bytes
    texts = [ffi.string(x).decode() for x in (info.isa, info.activation)]
    assert texts == [ISA_PATHS[-1], "float"]
    assert ffi.string(engines.get(activations="auto").info.activation).startswith(b"int8")
    numerics = {ffi.string(engines.get(kv=kv).info.numerics) for kv in ("f32", "bf16")}
    assert len(numerics) == 2
