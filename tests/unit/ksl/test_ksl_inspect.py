"""`kslserve inspect`: fields, exit statuses, digests and the memory plan."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kslserve.cli import run
from kslserve.engine.codecs import encoded_bytes
from kslserve.ksl.convert import convert
from kslserve.ksl.open import open_model
from tests.unit.ksl import ksl1_reference as one
from tests.unit.ksl import ksl_build
from tests.unit.ksl.test_ksl1_read import matrices
from tests.unit.ksl.test_ksl1_write import source_folder
from tests.unit.ksl.test_ksl_convert_cli import Terminal

MODEL = one.Model()
VALUES = MODEL.values()


@pytest.fixture(scope="module")
def production() -> bytes:
    return one.write(MODEL, VALUES, matrices(one.PRODUCTION))


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    base = tmp_path_factory.mktemp("inspect")
    source = source_folder(base / "m", MODEL, VALUES)
    (source / "tokenizer.json").write_bytes(ksl_build.tokenizer(100))
    convert(str(source), str(base / "m.ksl"))
    return (base / "m.ksl").read_bytes()


def inspect(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = run(["inspect", *words, "--json"])
    found = json.loads(capsys.readouterr().out) if status < 2 else {}
    return status, found


def put(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "m.ksl"
    path.write_bytes(data)
    return str(path)


def test_ksl1(tmp_path: Path, production: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, production)
    status, found = inspect(capsys, path, "--verify")
    assert status == 0
    assert (found["path"], found["kind"], found["flags"]) == (path, "ksl1", "0x53d")
    assert found["header"]["hidden_size"] == 160
    assert found["header"]["layer_types"] == [1, 1, 2]
    assert found["block_scaled_e2m3"] is found["has_mtp_section"] is found["payload_match"] is True
    assert found["layer_type_counts"] == {"linear_attention": 2, "full_attention": 1}
    kinds = [kind for _, kind, _, _ in MODEL.tensors(mtp=True)]
    assert found["tensor_kind_counts"] == {
        "bf16": kinds.count("n"), "e2m3": kinds.count("q"), "f32": kinds.count("f")
    }  # fmt: skip
    payload = len(production) - 119
    assert found["expected_payload_bytes"] == found["actual_payload_bytes"] == payload
    assert found["tensor_bytes"] == payload == sum(found["component_bytes"].values())
    assert found["component_bytes"]["embedding"] == 2 * 208 * 160
    elements = sum(rows * cols for _, _, rows, cols in MODEL.tensors(mtp=True))
    assert found["parameters"] == elements
    assert found["bits_per_weight"] == round(8 * payload / elements, 4)
    assert found["verify"] == {"wrong": [], "sha256": hashlib.sha256(production).hexdigest()}
    assert found["config"]["rms_norm_eps"] == 1e-6
    assert found["text_files"] == []


@pytest.mark.parametrize(
    ("flags", "e2m3", "mtp"), [(0x13D, True, False), (0x43D, False, True), (0x01D, False, False)]
)
def test_flags(
    tmp_path: Path, flags: int, e2m3: bool, mtp: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(tmp_path, one.write(MODEL, VALUES, matrices(flags), flags))
    status, found = inspect(capsys, path)
    assert status == 0
    assert found["flags"] == f"0x{flags:03x}"
    assert (found["block_scaled_e2m3"], found["has_mtp_section"]) == (e2m3, mtp)
    assert found["payload_match"] is True


@pytest.mark.parametrize("change", [-1, 1, -100_000])
def test_a_ksl1_payload_of_another_size(
    tmp_path: Path, production: bytes, change: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = put(tmp_path, production)
    os.truncate(path, len(production) + change)
    status, found = inspect(capsys, path, "--verify")
    assert status == 1
    assert found["payload_match"] is False
    assert found["actual_payload_bytes"] - found["expected_payload_bytes"] == change
    assert found["block_scaled_e2m3"] is True
    assert found["tensor_kind_counts"]["e2m3"] > 0
    assert found["notes"][0].startswith("it cannot be served: ")
    assert "verify" not in found


def test_files_that_are_described_but_not_read(
    tmp_path: Path, production: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse = MODEL.header(0x73D) + production[119:] + bytes(1000)
    status, found = inspect(capsys, put(tmp_path, sparse))
    assert (status, found["payload_match"], found["flags"]) == (0, False, "0x73d")
    half = MODEL.header(0x539, non_quant_dtype=1) + production[119:]
    status, found = inspect(capsys, put(tmp_path, half))
    assert (status, found["payload_match"]) == (0, True)
    assert "f16" in found["tensor_kind_counts"]


def test_damage_inside_a_ksl1_file(
    tmp_path: Path, production: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    at = 119 + 2 * 208 * 160 + 2 * 160 + 8  # the first scale of the head
    data = production[:at] + bytes(4) + production[at + 4 :]
    assert run(["inspect", put(tmp_path, data)]) == 2
    assert f"a positive finite scale at byte {at}, found 0.0" in capsys.readouterr().err


def test_container(tmp_path: Path, container: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, container)
    status, found = inspect(capsys, path, "--verify")
    assert status == 0
    assert (found["kind"], found["format"], found["version"]) == ("container", "ksl2", 1)
    assert (found["weights"], found["head"], found["flags"]) == ("fp6", "fp6", None)
    assert found["payload_match"] is found["has_mtp_section"] is True
    assert found["verify"] == {"wrong": []}
    assert found["text_files"] == ["tokenizer.json", "config.json"]
    assert found["config"] == MODEL.config()
    damaged = bytearray(container)
    damaged[-1000] ^= 1
    status, found = inspect(capsys, put(tmp_path, bytes(damaged)), "--verify")
    assert status == 1
    assert found["verify"]["wrong"] == ["lm_head.weight"]
    os.truncate(path, len(container) - 64)
    status, found = inspect(capsys, path)
    assert (status, found["payload_match"]) == (1, False)
    assert found["expected_payload_bytes"] - found["actual_payload_bytes"] == 64


def test_folder_and_bundled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = source_folder(tmp_path / "m", MODEL, VALUES)
    status, found = inspect(capsys, str(source))
    assert status == 0
    assert (found["kind"], found["payload_match"]) == ("folder", None)
    assert found["tensor_kind_counts"] == {"bf16": len(MODEL.tensors(mtp=True))}
    assert found["bits_per_weight"] == 16
    assert run(["inspect", str(source), "--verify"]) == 2
    assert "only files have digests" in capsys.readouterr().err
    status, found = inspect(capsys, "ksl-nano", "--verify")
    assert (status, found["parameters"]) == (0, 18_054_856)


def test_for_people(tmp_path: Path, production: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, production)
    assert run(["inspect", path, "--verify", "--plan", "--vram", "1GiB", "--context", "512"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = dict(line.split(maxsplit=1) for line in lines if " " in line)
    assert table["hidden_size"] == "160"
    assert table["flags"] == "0x53d"
    assert table["payload_match"] == table["block_scaled_e2m3"] == "yes"
    assert table["layer_type_counts"] == "linear_attention 2, full_attention 1"
    assert table["sha256"] == hashlib.sha256(production).hexdigest()
    assert "It fits." in lines
    assert run(["inspect", "ksl-nano"]) == 0
    assert "ksl2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["/nonexistent"],
        ["synth:9999b"],
        ["ksl-nano", "--plan"],
        ["ksl-nano", "--vram", "1GiB"],
        ["ksl-nano", "--plan", "--vram", "much"],
        ["ksl-nano", "--plan", "--vram", "-1GiB"],
        ["ksl-nano", "--plan", "--vram", "nan"],
        ["ksl-nano", "--plan", "--vram", "1GiB", "--kv", "q5"],
        ["ksl-nano", "--plan", "--vram", "1GiB", "--context", "0"],
        ["ksl-nano", "--plan", "--vram", "1GiB", "--kv-ring", "100"],
        ["ksl-nano", "--plan", "--vram", "1GiB", "--weights", "nvfp4"],
        [],
    ],
)
def test_mistakes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("kslserve: ")
    assert " _" not in lines[0], "the name of a function"


def test_no_model_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for data in (b"", b"TQF1" + bytes(300), b"GGUF", bytes(64), b"\xff" * 64):
        assert run(["inspect", put(tmp_path, data)]) == 2
        assert capsys.readouterr().err.startswith("kslserve: ")
    (tmp_path / "folder").mkdir()
    assert run(["inspect", str(tmp_path / "folder")]) == 2
    assert "config.json" in capsys.readouterr().err


def test_the_plan_of_the_27b(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["synth:27b", "--plan", "--context", "262144", "--kv", "q4", "--max-seqs", "2"]
    status, found = inspect(capsys, *words, "--vram", "64GiB")
    assert status == 0
    plan = found["plan"]
    assert plan["kv_token"] == 28_560  # with the MTP layer
    assert plan["kv"] == 2 * 262144 * 28_560
    assert plan["slab"] == 156_893_184 + 20_480
    assert plan["slabs"] == 2 * plan["slab"]
    assert plan["checkpoints"] == 4 * (plan["slab"] + 128 * 28_560)
    parts = ("weights", "workspace", "kv", "slabs", "checkpoints", "slots")
    assert plan["total"] == sum(plan[part] for part in parts)
    assert plan["headroom"] == (64 << 30) - plan["total"]
    assert plan["fits"] is True
    # 24,699,207,680 projection weights with MTP and the head in FP6, the embedding in bf16
    assert 22.0e9 < plan["weights"] < 22.2e9
    status, found = inspect(capsys, *words, "--vram", "32GiB")
    tight = found["plan"]
    assert (tight["fits"], tight["total"]) == (False, plan["total"])
    assert 128 * 1000 < tight["largest_context"] < 262144
    # exactly the largest: one block more does not fit
    context = tight["largest_context"]
    for more, fits in ((0, True), (1, False)):
        _, found = inspect(capsys, *words[:2], "--context", str(context + more), "--vram", "32GiB")
        assert found["plan"]["fits"] is fits
    _, found = inspect(capsys, *words, "--vram", "8GiB")
    assert found["plan"]["largest_context"] == 0
    _, found = inspect(capsys, *words, "--vram", "32GiB", "--weights", "nvfp4", "--head", "nvfp4")
    assert found["plan"]["weights"] < 0.8 * plan["weights"]


def test_the_plan_counts_the_ring_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """16 attention layers of 4 heads of 256: a byte a value and a half per 64 of them, keys and
    values. The MTP layer has no part in it."""
    words = ["synth:27b", "--plan", "--vram", "64GiB", "--kv", "int8ring_int4"]
    slabs = {}
    for ring in (64, 1024, 4096):
        slabs[ring] = inspect(capsys, *words, "--kv-ring", str(ring))[1]["plan"]["slab"]
    assert inspect(capsys, *words)[1]["plan"]["slab"] == slabs[1024]
    position = 16 * 4 * 2 * (256 + 2 * 256 // 64)
    assert slabs[1024] - slabs[64] == (1024 - 64) * position
    assert slabs[4096] - slabs[1024] == (4096 - 1024) * position
    bf16 = ["synth:27b", "--plan", "--vram", "64GiB", "--kv", "bf16", "--kv-ring", "4096"]
    assert inspect(capsys, *bf16)[1]["plan"]["slab"] == slabs[64] - 64 * position


def test_the_plan_of_a_cut_file(
    tmp_path: Path, container: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container that is not whole still says what it would take."""
    path = put(tmp_path, container[:-64])
    status, found = inspect(capsys, path, "--plan", "--vram", "1GiB")
    assert (status, found["plan"]["fits"]) == (1, True)


@pytest.mark.parametrize("kind", ["ksl1", "container", "folder", "ksl-nano"])
def test_any_model_has_a_plan(
    tmp_path: Path,
    production: bytes,
    container: bytes,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With weights as the engine will hold them, and a largest context that is exactly that."""
    path = kind
    if kind == "folder":
        path = str(source_folder(tmp_path / "m", MODEL, VALUES))
    elif kind != "ksl-nano":
        path = put(tmp_path, production if kind == "ksl1" else container)
    with open_model(path) as model:
        weights = encoded_bytes(model.tensors)
    words = [path, "--plan", "--kv", "bf16", "--max-seqs", "3", "--checkpoints", "0"]
    status, found = inspect(capsys, *words, "--vram", "1GiB", "--context", "100")
    assert status == 0
    plan = found["plan"]
    assert plan["weights"] == weights
    assert plan["fits"] is True
    assert plan["headroom"] == (1 << 30) - plan["total"] > 0
    largest = plan["largest_context"]
    for more, fits in ((0, True), (1, False)):
        _, found = inspect(capsys, *words, "--vram", "1GiB", "--context", str(largest + more))
        assert found["plan"]["fits"] is fits


def test_digests_have_a_bar_on_a_terminal(
    tmp_path: Path, production: bytes, container: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data in (production, container):
        screen = Terminal()
        monkeypatch.setattr("sys.stderr", screen)
        assert run(["inspect", put(tmp_path, data), "--verify"]) == 0
        assert "100 %" in screen.getvalue()
        assert screen.getvalue().endswith("\r")  # the line is taken away
