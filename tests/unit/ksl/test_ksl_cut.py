"""Files that become shorter while they are in use: an error, and never the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kslserve.ksl.convert import convert
from tests.unit.ksl.ksl_build import folder, text_config

# Runs a command line, and cuts the model's file at the given read.
CUT_WHILE_READING = """
import os, sys
from kslserve.cli import run
from kslserve.ksl.files import RegularFile
path, after = sys.argv[1], int(sys.argv[2])
real, reads = RegularFile.read, 0
def read(self, start, size):
    global reads
    reads += 1
    if reads == after:
        os.truncate(path, 100)
    return real(self, start, size)
RegularFile.read = read
sys.exit(run(sys.argv[3:]))
"""

# The same for serving; reads count from the first that the engine asks for.
CUT_WHILE_PACKING = """
import os, sys
from kslserve.cli import run
from kslserve.engine.native import NativeEngine
from kslserve.ksl.files import RegularFile
path, after = sys.argv[1], int(sys.argv[2])
open_engine, real, reads = NativeEngine.open, RegularFile.read, 0
def open(*args, **options):
    def read(self, start, size):
        global reads
        reads += 1
        if reads == after:
            os.truncate(path, 100)
        return real(self, start, size)
    RegularFile.read = read
    return open_engine(*args, **options)
NativeEngine.open = open
sys.exit(run(["serve", "--model", sys.argv[3], "--port", "0"]))
"""


@pytest.fixture
def models(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """kind: (what to open, the file that holds its tensors)."""
    source = folder(tmp_path / "m", text_config(linear_num_value_heads=16, intermediate_size=64))
    convert(str(source), str(tmp_path / "c.ksl"))
    convert(str(source), str(tmp_path / "k.ksl"), file_format="ksl1")
    return {
        "folder": (str(source), str(source / "model.safetensors")),
        "container": (str(tmp_path / "c.ksl"),) * 2,
        "ksl1": (str(tmp_path / "k.ksl"),) * 2,
    }


@pytest.mark.parametrize("kind", ["folder", "container", "ksl1"])
@pytest.mark.parametrize("command", ["convert", "inspect"])
def test_cut_while_reading(
    tmp_path: Path, models: dict[str, tuple[str, str]], kind: str, command: str
) -> None:
    path, file = models[kind]
    words = [path, str(tmp_path / "x.ksl")] if command == "convert" else [path, "--verify"]
    after = "12" if command == "convert" or kind != "folder" else "2"
    done = subprocess.run(
        [sys.executable, "-c", CUT_WHILE_READING, file, after, command, *words],
        capture_output=True, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"kslserve: {file}: ")
    if kind != "folder" or command == "convert":
        assert "the file now ends at byte 100: it was cut while it was read" in lines[0]
    assert not os.path.exists(tmp_path / "x.ksl")


@pytest.mark.parametrize("kind", ["folder", "container", "ksl1"])
@pytest.mark.parametrize("after", ["1", "9"])
def test_cut_while_an_engine_packs(
    models: dict[str, tuple[str, str]], kind: str, after: str
) -> None:
    path, file = models[kind]
    done = subprocess.run(
        [sys.executable, "-c", CUT_WHILE_PACKING, file, after, path],
        capture_output=True, check=False, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith(f"kslserve: {file}: expected ")
    assert last.endswith("but the file now ends at byte 100: it was cut while it was read.")
