"""`kslserve selftest`: right where the backend is right, and wrong where it is not."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest

from kslserve.cli import run as command
from kslserve.engine.model import ModelSpec, PoolSizes, TensorArg
from kslserve.engine.native import CPU_LIBRARY, NativeEngine
from kslserve.engine.types import Draft, OpKind, Row, StateOp
from kslserve.errors import EngineError
from kslserve.selftest import chosen, moved, parity, served
from kslserve.selftest.models import SHAPES, random_tensors
from kslserve.selftest.waves import Waves

ROWS = [
    "decode",
    "decode of 5",
    "drafts",
    "short prompts",
    "first product",
    "prompt",
    "prompt beside decode",
    "unwatched",
    "own drafts",
    "sampled ids",
    "masked ids",
    "cuts",
    "copies",
]


def opener(isa: str, spec: ModelSpec, tensors: list[TensorArg], sizes: PoolSizes) -> NativeEngine:
    return NativeEngine.open(
        spec, tensors, sizes, kv_format="f32", activations="float", isa=isa, library=CPU_LIBRARY
    )


def test_what_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["selftest", "--device", "cpu", "--quick", "--no-bench", "--seed", "5"]) == 0
    out = capsys.readouterr().out
    assert "cpu: all right" in out
    assert "WRONG" not in out
    assert out.count("prompt beside decode") >= 2


def test_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend whose head has two columns swapped."""
    spec = SHAPES["ragged"]
    tensors = random_tensors(spec, "bf16", 3)

    def swapped(*args: Any) -> NativeEngine:
        head = next(t for t in tensors if t.name == "lm_head.weight")
        values = head.data.view("<u2").reshape(head.rows, head.cols).copy()
        values[:, [0, 7]] = values[:, [7, 0]]
        other = TensorArg(head.name, head.encoding, head.rows, head.cols, values)
        return opener("auto", spec, [t if t is not head else other for t in tensors], args[2])

    results = parity.compare(swapped, partial(opener, "scalar"), spec, tensors, 3)
    assert [result.rows for result in results] == ROWS
    # The head is not in the first product, and as wrong unwatched.
    right = [parity.PRODUCTS, *ROWS[ROWS.index(served.UNWATCHED) :]]
    assert [result.rows for result in results if result.right] == right
    results = parity.compare(partial(opener, "auto"), partial(opener, "scalar"), spec, tensors, 3)
    assert all(result.right and result.same_best == 1 for result in results)

    monkeypatch.setattr(parity, "compare", lambda *args: [parity.Parity("decode", 1.0, 0.1, 0.0)])
    assert command(["selftest", "--device", "cpu", "--quick", "--no-bench"]) == 1
    assert "WRONG" in capsys.readouterr().out


def other_row(what: str, row: Row, watched: bool) -> Row:
    """What a wrong backend makes of a row."""
    if what == served.DRAFTED and row.draft is Draft.OWN:
        return dataclasses.replace(row, tokens=[3])
    # No other part runs rows of so many columns unwatched.
    if what == served.UNWATCHED and not watched and row.n == served.LONG:
        return dataclasses.replace(row, tokens=[5] * row.n)
    if what == moved.CUTS:
        return dataclasses.replace(row, cuts=tuple((min(at + 1, row.n), s) for at, s in row.cuts))
    return row


def other_op(what: str, op: StateOp) -> StateOp:
    """What a wrong backend makes of an op."""
    if what == chosen.SAMPLED and op.kind is OpKind.CONFIGURE:
        sampling = dataclasses.replace(op.data.sampling, top_k=0)
        return dataclasses.replace(op, data=dataclasses.replace(op.data, sampling=sampling))
    if what == chosen.MASKED and op.kind is OpKind.MASK:
        return dataclasses.replace(op, data=op.data | np.uint32(1 << 9))
    if what == moved.COPIES and op.kind is OpKind.LOAD_SLAB and op.b:
        return dataclasses.replace(op, b=0)
    return op


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        (served.UNWATCHED, [served.UNWATCHED]),
        (served.DRAFTED, [served.DRAFTED]),
        (chosen.SAMPLED, [chosen.SAMPLED, chosen.MASKED]),
        (chosen.MASKED, [chosen.MASKED]),
        (moved.CUTS, [moved.CUTS]),
        (moved.COPIES, [moved.COPIES]),
    ],
)
def test_what_is_served_wrong(monkeypatch: pytest.MonkeyPatch, what: str, wrong: list[str]) -> None:
    """A backend that takes other ids where nobody watches it or where it verifies its drafts, that
    ignores top_k, allows an id too many, cuts a row a position too late, or puts the parts of an
    image into the same place."""
    send = Waves.send

    def altered(self: Waves, **parts: Any) -> Any:
        rows = [other_row(what, row, bool(parts.get("taps"))) for row in parts.get("rows", ())]
        before = [other_op(what, op) for op in parts.get("before", ())]
        return send(self, **{**parts, "rows": rows, "before": before})

    monkeypatch.setattr(Waves, "send", altered)
    spec = SHAPES["ragged"]
    tensors = random_tensors(spec, "bf16", 3)
    results = parity.compare(partial(opener, "auto"), partial(opener, "scalar"), spec, tensors, 3)
    assert [result.rows for result in results if not result.right] == wrong


def test_a_backend_that_fails_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what it says it lacks is left out."""

    def fails(*args: Any) -> list[parity.Parity]:
        raise EngineError("a kernel failed.")

    monkeypatch.setattr(parity, "compare", fails)
    assert command(["selftest", "--device", "cpu", "--quick", "--no-bench"]) == 1
    assert "WRONG: a kernel failed." in capsys.readouterr().out


def test_without_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kslserve.engine.cuda.find_library", lambda: None)
    assert command(["selftest", "--device", "cuda"]) == 2
    assert "python build.py cuda" in capsys.readouterr().out
