"""The server on a device: settings that reach the engine, and the self-test."""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest

from kslserve.cli import run as command
from kslserve.config import Settings
from kslserve.engine.cuda import CudaLibrary
from kslserve.engine.types import RowKind
from kslserve.ksl.open import open_model
from tests.native.driver import Driver
from tests.server.serving import Server, serving

pytestmark = pytest.mark.cuda

TEXT = "def add(a, b):\n    return a + b\n\n# The capital of France is Paris.\n" * 16
COLUMNS = 256  # the products of a prompt are those of large waves


def encoded(server: Server) -> list[int]:
    service = server.app.state.service
    assert service is not None
    return [int(i) for i in service.tokenizer.encode(TEXT)][: COLUMNS - 1]


def scores(server: Server, ids: list[int]) -> list[float]:
    body = {"prompt": [ids], "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
    request = urllib.request.Request(
        server.url + "/completions",
        json.dumps({"model": "m", **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        (choice,) = json.load(response)["choices"]
    found: list[float] = choice["logprobs"]["token_logprobs"][1:]
    return found


def truth(ids: list[int]) -> list[float]:
    """Log-probabilities of all ids but the first by the scalar reference, in float32."""
    with (
        open_model("ksl-nano") as model,
        Driver(
            model.spec, model.tensors, slots=1, slabs=1, blocks=32, blocks_per_slot=32,
            wave_columns=COLUMNS, threads=4,
        ) as driver,
    ):  # fmt: skip
        stream = driver.begin(0)
        row = stream.row(RowKind.PREFILL, ids)
        logits = stream.run(row, ("logits",)).taps["logits"][:, : model.spec.token_limit]
    logits = logits[:-1].astype(np.float64)
    peak = logits.max(1, keepdims=True)
    logits -= peak + np.log(np.exp(logits - peak).sum(1, keepdims=True))
    return [float(logits[at, token]) for at, token in enumerate(ids[1:])]


def test_the_activation_setting_reaches_the_engine(cuda: CudaLibrary) -> None:
    """FP6 products of large waves take e4m3; with `--activations float` they take halves, which
    are a tenth as far from the reference."""
    far, told = {}, {}
    for activations in ("float", "auto"):
        settings = Settings(
            device="cuda", activations=activations, kv="f32", context=1024, max_seqs=2,
            wave_columns=COLUMNS,
        )  # fmt: skip
        with serving(settings) as server:
            ids = encoded(server)
            assert len(ids) == COLUMNS - 1
            assert server.app.engine is not None
            told[activations] = server.app.engine.info.activation
            found = np.array(scores(server, ids))
            far[activations] = float(np.abs(found - truth(ids)).mean())
    print(far)
    assert told == {"float": "f16", "auto": "f16, e4m3"}
    assert 0 < far["float"] < 5e-3
    assert 3 * far["float"] < far["auto"] < 0.1


def test_selftest(cuda: CudaLibrary, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["selftest", "--device", "cuda", "--quick", "--no-bench"]) == 0
    assert "cuda: all right" in capsys.readouterr().out
