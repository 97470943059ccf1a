"""Golden checkpoints within the gates of tests/data/golden/README.md, on every ISA path."""

from __future__ import annotations

import numpy as np
import pytest

from kslserve.engine import codecs
from kslserve.engine.types import Draft, OpKind, RowKind, StateOp
from tests.native.driver import Driver
from tests.native.golden import golden_arrays, golden_model


def check_logits(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 5e-4
    assert np.linalg.norm(found - expected) <= 2e-5 * np.linalg.norm(expected)


def check_state(found: np.ndarray, expected: np.ndarray, gate: float = 1e-4) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= gate


@pytest.fixture(params=("g1-tied", "g2-untied"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_position_and_hidden_state(name: str, isa: str) -> None:
    golden = golden_arrays(name)
    with Driver(*golden_model(name), isa=isa) as driver:
        stream = driver.begin(0)
        layers = [f"layers.{i}.out" for i in range(4)]
        row = stream.row(RowKind.PREFILL, golden["input_ids"])
        result = stream.run(row, ["logits", "embed", *layers, "final_norm"])
    check_logits(result.taps["logits"], golden["logits"])
    for tap, expected in zip(
        ["embed", *layers, "final_norm"], golden["hidden_states"], strict=True
    ):
        check_state(result.taps[tap], expected)


def test_states_after_the_prompt(name: str, isa: str) -> None:
    golden = golden_arrays(name)
    spec, tensors = golden_model(name)
    with Driver(spec, tensors, isa=isa) as driver:
        stream = driver.begin(0)
        stream.prefill(golden["input_ids"])
        image = driver.slab_image(0).view("<f4")
        blocks = [driver.block_image(b).view("<f4") for b in stream.blocks[:9]]
    states = [golden[f"state_S_{i}"] for i in range(3)]
    size = states[0].size
    check_state(image[: 3 * size].reshape(3, *states[0].shape), np.stack(states))
    history = np.stack([golden[f"state_conv_{i}"] for i in range(3)])
    check_state(image[3 * size :][: history.size].reshape(history.shape), history)
    check_state(image[3 * size + history.size :], golden["hidden_states"][5, -1])
    if "state_k_3" not in golden:
        return
    shape = (2, 2, 16, spec.kv_heads, spec.head_dim)
    pages = np.concatenate([block.reshape(shape)[0] for block in blocks], axis=1)[:, :133]
    check_state(pages[0], golden["state_k_3"])
    check_state(pages[1], golden["state_v_3"])


def test_inner_tensors(isa: str) -> None:
    golden = golden_arrays("g1-tied")
    expected = {
        key.replace("dbg", "layers.", 1).replace("_", ".", 1): array
        for key, array in golden.items()
        if key.startswith("dbg")
    }
    assert len(expected) == 19
    with Driver(*golden_model("g1-tied"), isa=isa) as driver:
        stream = driver.begin(0)
        row = stream.row(RowKind.PREFILL, golden["input_ids"][:24])
        result = stream.run(row, list(expected))
    for tap, array in expected.items():
        check_state(result.taps[tap], array.reshape(24, -1))


def test_greedy_ids_whole_and_split(name: str, isa: str) -> None:
    golden = golden_arrays(name)
    ids = golden["input_ids"]
    with Driver(*golden_model(name), isa=isa) as driver:
        whole = driver.begin(0)
        first = whole.last(ids)
        assert [first, *whole.decode(63)] == golden["greedy_ids"].tolist()

        plan = golden["split_plan"].tolist()
        assert sum(plan) == len(ids)
        split = driver.begin(1)
        at, logits = 0, []
        for n in plan:
            row = split.row(RowKind.PREFILL, ids[at : at + n])
            logits.append(split.run(row, ["logits"]).taps["logits"])
            at += n
        check_logits(np.concatenate(logits), golden["logits"])
        assert int(logits[-1][-1].argmax()) == golden["greedy_ids"][0]


def test_mtp_head_and_draft_chain(name: str, isa: str) -> None:
    golden = golden_arrays(name)
    ids, greedy = golden["input_ids"], golden["greedy_ids"]
    forced = np.append(ids, greedy[:1])
    with Driver(*golden_model(name), isa=isa) as driver:
        stream = driver.begin(0)
        result = stream.run(stream.row(RowKind.PREFILL, forced), ["mtp_logits", "mtp_hidden"])
        assert not result.taps["mtp_hidden"][0].any()  # position 0 has no MTP row
        check_logits(result.taps["mtp_logits"][1:], golden["mtp_logits"])
        check_state(result.taps["mtp_hidden"][1:], golden["mtp_hidden"])

        # Drafts are read back by forcing the expected ids: each agreement is an accepted draft.
        chain = golden["mtp_chain_ids"]
        stream = driver.begin(1)
        row = stream.run(stream.row(RowKind.LAST, ids, propose=len(chain))).rows[0]
        assert row.tokens == [greedy[0]]
        assert row.proposed == len(chain)
        expected = np.append(chain, 0).astype(np.int32)
        driver.wave(before=[StateOp(OpKind.FORCE, 1, data=expected)])
        verify = stream.row(RowKind.VERIFY, [-1], 1 + len(chain), draft=Draft.OWN)
        row = stream.run(verify).rows[0]
        assert row.accepted == len(chain)
        assert row.tokens == expected.tolist()


def test_block_fp8(isa: str) -> None:
    golden = golden_arrays("g1-tied-fp8")
    ids = np.append(golden["input_ids"], golden["logits"][-1].argmax())
    spec, tensors = golden_model("g1-tied-fp8")
    (k_proj,) = (t for t in tensors if t.name == "model.layers.3.self_attn.k_proj.weight")
    assert k_proj.encoding == codecs.ENC_FP8
    values = codecs.decode(k_proj.encoding, k_proj.data, k_proj.scales, None, 64, 128)
    assert values.tobytes() == golden["dequant_layer3_k_proj"].tobytes()
    with Driver(spec, tensors, isa=isa) as driver:
        stream = driver.begin(0)
        result = stream.run(stream.row(RowKind.PREFILL, ids), ["logits", "mtp_logits"])
    check_logits(result.taps["logits"][:-1], golden["logits"])
    check_logits(result.taps["mtp_logits"][1:], golden["mtp_logits"])
