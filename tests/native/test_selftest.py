"""`kslserve selftest`: right where the backend is right, and wrong where it is not."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

from kslserve.cli import run as command
from kslserve.engine.model import ModelSpec, PoolSizes, TensorArg
from kslserve.engine.native import CPU_LIBRARY, NativeEngine
from kslserve.engine.types import Draft, Row, RowKind
from kslserve.errors import EngineError
from kslserve.selftest import parity, served
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
    right = [parity.PRODUCTS, served.UNWATCHED, served.DRAFTED]
    assert [result.rows for result in results if result.right] == right
    results = parity.compare(partial(opener, "auto"), partial(opener, "scalar"), spec, tensors, 3)
    assert all(result.right and result.same_best == 1 for result in results)

    monkeypatch.setattr(parity, "compare", lambda *args: [parity.Parity("decode", 1.0, 0.1, 0.0)])
    assert command(["selftest", "--device", "cpu", "--quick", "--no-bench"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("what", [served.UNWATCHED, served.DRAFTED])
def test_what_is_served_wrong(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A backend that takes other ids where nobody watches it, or where it verifies its drafts."""
    send = Waves.send

    def altered(self: Waves, **parts: Any) -> Any:
        def other(row: Row) -> Row:
            if what == served.DRAFTED:
                return dataclasses.replace(row, tokens=[3]) if row.draft is Draft.OWN else row
            wrong = not parts.get("taps") and row.kind is RowKind.PREFILL
            return dataclasses.replace(row, tokens=[5] * row.n) if wrong else row

        return send(self, **{**parts, "rows": [other(row) for row in parts.get("rows", ())]})

    monkeypatch.setattr(Waves, "send", altered)
    spec = SHAPES["ragged"]
    tensors = random_tensors(spec, "bf16", 3)
    results = parity.compare(partial(opener, "auto"), partial(opener, "scalar"), spec, tensors, 3)
    assert [result.rows for result in results if not result.right] == [what]


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
