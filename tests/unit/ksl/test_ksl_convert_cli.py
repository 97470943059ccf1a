from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kslserve.cli import run as run_line
from kslserve.cli.convert import add_arguments, run
from kslserve.cli.progress import Bar
from kslserve.errors import ModelFileError
from kslserve.ksl.open import open_model
from kslserve.ksl.publish import UNFINISHED
from tests.unit.ksl.ksl_build import folder, text_config


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path / "m", text_config(intermediate_size=36))
    target = str(tmp_path / "m.ksl")
    assert run(parse(str(source), target, "--weights", "nvfp4", "--head", "nvfp4")) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("layer 0: 14 tensors, ")
    assert any(line.startswith("note: model.layers.0.mlp.down_proj.weight stays") for line in out)
    assert out[-1] == f"{target}: {Path(target).stat().st_size} bytes, weights nvfp4, head nvfp4"
    with open_model(target) as model:
        assert (model.weights, model.head) == ("nvfp4", "nvfp4")


def test_choices() -> None:
    args = parse("a", "b")
    assert (args.source, args.destination, args.weights, args.head) == ("a", "b", "auto", "auto")
    assert (args.format, args.mtp, args.migrate, args.verify) == ("container", True, False, False)
    assert parse("a", "b", "--no-mtp").mtp is False
    for words in (["--weights", "int4"], ["--format", "gguf"]):
        with pytest.raises(SystemExit):
            parse("a", "b", *words)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken.ksl"
    taken.write_bytes(b"mine")
    source = str(folder(tmp_path / "m"))
    for words in (
        [source, str(taken)],
        [str(tmp_path / "missing"), str(tmp_path / "x.ksl")],
        [source, str(tmp_path / "x.ksl"), "--format", "ksl1"],
        [source],
    ):
        assert run_line(["convert", *words]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("kslserve: ")
    assert taken.read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["m", "taken.ksl"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    target = str(tmp_path / "m.ksl")
    assert run(parse(str(folder(tmp_path / "m")), target)) == 0
    bar, _, rest = out.getvalue().rpartition("\r")
    assert "layer 0" not in bar
    assert "100 %" in bar
    assert rest.splitlines() == [
        f"{target}: {Path(target).stat().st_size} bytes, weights fp6, head fp6"
    ]


def test_the_bar() -> None:
    out, now = io.StringIO(), 0.0
    bar = Bar(out, lambda: now)
    drawn = []
    for at, done in [(1.0, 100 << 20), (1.01, 110 << 20), (100.0, 300 << 20), (101.0, 400 << 20)]:
        now = at
        bar.advance(done, 400 << 20)
        drawn.append(out.getvalue().rpartition("\r")[2].rstrip())
    assert drawn[0] == "[######..................]  25 %  100 MiB/s  0:03 left"
    assert drawn[1] == drawn[0]  # too soon to draw again
    assert drawn[2] == "[##################......]  75 %  3 MiB/s  0:33 left"
    assert drawn[3] == "[########################] 100 %  4 MiB/s  0:00 left"
    bar.clear()
    assert out.getvalue().endswith("\r")
    out, now = io.StringIO(), 0.0
    bar = Bar(out, lambda: now)
    now = 7200.0
    bar.advance(1, 2)
    assert out.getvalue().endswith("2:00:00 left")


# Converts, and tells when the first bytes were written; then waits until it is ended.
STUCK = """
import os, sys, threading
from kslserve.cli import run
from kslserve.ksl.publish import NewFile
real = NewFile.put
def put(self, position, data):
    real(self, position, data)
    if position:
        os.write(1, b"writing\\n")
        threading.Event().wait(60)
NewFile.put = put
sys.exit(run(["convert", *sys.argv[1:]]))
"""
# A shell's background jobs ignore SIGINT, and so would this process if the suite ran in one.
STOPPED = (
    "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    + STUCK.replace("threading.Event().wait(60)", "threading.Event().wait(0.2)")
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, number: int) -> None:
    source = folder(tmp_path / "m")
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(source), str(tmp_path / "x.ksl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert error == b"kslserve: interrupted; nothing was written.\n"
    assert process.returncode == 130
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize("file_format", ["container", "ksl1"])
def test_a_killed_run_leaves_a_file_that_says_so(tmp_path: Path, file_format: str) -> None:
    source = folder(tmp_path / "m", text_config(linear_num_value_heads=16, intermediate_size=64))
    with subprocess.Popen(
        [
            sys.executable, "-c", STUCK, str(source), str(tmp_path / "x.ksl"),
            "--format", file_format,
        ],
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        process.kill()
    (left,) = set(os.listdir(tmp_path)) - {"m"}
    assert left.startswith("x.ksl.")
    assert left.endswith(".part")
    assert (tmp_path / left).read_bytes().startswith(UNFINISHED)
    with pytest.raises(ModelFileError, match="an interrupted conversion left: delete it"):
        open_model(str(tmp_path / left))


# The shapes of a 27B, a tenth as wide in every direction; its data are holes.
MEMORY = """
import json, resource, sys
from kslserve.ksl.convert import convert
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
source, target, warm, file_format = sys.argv[1:]
convert(warm, target + ".warm", file_format=file_format, workers=2)
before = peak()
convert(source, target, file_format=file_format, workers=2)
print(peak() - before)
"""


def sparse_folder(path: Path, config: dict[str, object]) -> int:
    """A folder whose tensors are zeros that take no space; the bytes of the largest."""
    import json

    from kslserve.ksl import layout
    from kslserve.ksl.hf_config import read_config

    spec = read_config(config, "test").spec
    shapes = layout.expected(spec) | {layout.HEAD: (spec.vocab, spec.hidden)}
    header, position, most = {}, 0, 0
    for name, (rows, cols) in shapes.items():
        shape = [rows] if cols == 1 else [rows, 1, cols] if layout.is_conv(name) else [rows, cols]
        size = 2 * rows * cols
        header[name] = {
            "dtype": "BF16", "shape": shape, "data_offsets": [position, position + size]
        }  # fmt: skip
        position += size
        most = max(most, size)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    text = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return most


@pytest.mark.parametrize("file_format", ["container", "ksl1"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, file_format: str) -> None:
    """The largest tensor alone would take more than all that a conversion adds."""
    config = text_config(
        hidden_size=512, intermediate_size=1728, vocab_size=248320, num_hidden_layers=8,
        num_attention_heads=24, num_key_value_heads=4, head_dim=32, linear_num_key_heads=16,
        linear_num_value_heads=48, linear_key_head_dim=16, linear_value_head_dim=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    largest = sparse_folder(tmp_path / "m", config)
    warm = folder(tmp_path / "w", text_config(linear_num_value_heads=16, intermediate_size=64))
    done = subprocess.run(
        [
            sys.executable, "-c", MEMORY, str(tmp_path / "m"), str(tmp_path / "m.ksl"), str(warm),
            file_format,
        ],
        capture_output=True, check=True,
    )  # fmt: skip
    grown = int(done.stdout)
    assert largest == 2 * 248320 * 512
    # two workers with stripes of 2 Mi elements: float32, bf16 and codes of each, and what waits
    assert grown < 2 * (7 * (2 << 20) + 4 * (2 << 20)) + (40 << 20) < largest // 2
