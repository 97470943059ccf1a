"""TQF1 to KSL1: exactly four bytes, nothing replaced, and safe wherever it stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kslserve.cli import run
from kslserve.errors import ModelFileError
from kslserve.ksl.migrate import migrate

BODY = bytes(range(256)) * 40


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "model.tqf"
    path.write_bytes(b"TQF1" + BODY)
    return path


def refused(old: Path, new: Path, *parts: str) -> None:
    before = old.read_bytes() if old.is_file() else None
    with pytest.raises(ModelFileError) as caught:
        migrate(str(old), str(new))
    for part in parts:
        assert part in caught.value.message, caught.value.message
    assert caught.value.message.endswith(".")
    assert before is None or old.read_bytes() == before


def test_four_bytes_and_a_name(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = old.with_suffix(".ksl")
    inode = old.stat().st_ino
    assert run(["convert", "--migrate", str(old), str(new)]) == 0
    assert new.read_bytes() == b"KSL1" + BODY
    assert new.stat().st_ino == inode
    assert os.listdir(old.parent) == ["model.ksl"]
    assert "KSL1 now" in capsys.readouterr().out


def test_other_signatures(old: Path) -> None:
    new = old.with_suffix(".ksl")
    for start, text in [
        (b"KSL1", "found KSL1: only rename the file"),
        (b"GGUF", "expected the signature TQF1 at byte 0, found b'GGUF'"),
        (b"tqf1", "found b'tqf1'"),
        (b"", "found b''"),
        (b"TQF", "found b'TQF'"),
    ]:
        old.write_bytes(start)
        refused(old, new, str(old), text)
    assert not new.exists()


def test_names_that_are_taken(old: Path) -> None:
    new = old.with_suffix(".ksl")
    new.write_bytes(b"mine")
    refused(old, new, str(new), "taken already")
    assert new.read_bytes() == b"mine"
    new.unlink()
    new.symlink_to("nowhere")
    refused(old, new, "taken already")
    refused(old, old, "taken already")
    refused(old, old.parent / "no" / "m.ksl", "folder cannot be used")


def test_things_that_are_no_files(tmp_path: Path, old: Path) -> None:
    new = tmp_path / "m.ksl"
    refused(tmp_path / "missing", new, "cannot open", "No such file")
    refused(tmp_path, new, "directory")
    link = tmp_path / "link.tqf"
    link.symlink_to(old)
    refused(link, new, "symbolic link: name the file itself")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", new, "regular file")
    assert old.read_bytes() == b"TQF1" + BODY


@pytest.mark.parametrize("mode", ["r+b", "ab"])
def test_a_file_that_is_open_for_writing(old: Path, mode: str) -> None:
    new = old.with_suffix(".ksl")
    script = f"import sys; f = open({str(old)!r}, {mode!r}); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        refused(old, new, f"process {holder.pid} has it open for writing")
        holder.communicate(b"\n")
    with open(old, "ab"):  # in this process too
        refused(old, new, f"process {os.getpid()}")
    migrate(str(old), str(new))


def test_hard_links_are_told(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = old.parent / "other.tqf"
    os.link(old, other)
    assert run(["convert", "--migrate", str(old), str(old.with_suffix(".ksl"))]) == 0
    assert "1 other names" in capsys.readouterr().out
    assert other.read_bytes() == b"KSL1" + BODY


def test_no_other_options(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = str(old.with_suffix(".ksl"))
    assert run(["convert", "--migrate", "--weights", "fp6", str(old), new]) == 2
    assert "takes no other option" in capsys.readouterr().err
    assert old.read_bytes()[:4] == b"TQF1"


def test_a_new_name_that_appears_meanwhile(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = old.with_suffix(".ksl")
    sync = os.fsync

    def take(handle: int) -> None:
        sync(handle)
        if not new.exists():
            new.write_bytes(b"mine")

    monkeypatch.setattr(os, "fsync", take)
    with pytest.raises(ModelFileError, match="has the new signature now, but could not be renamed"):
        migrate(str(old), str(new))
    assert new.read_bytes() == b"mine"
    assert old.read_bytes() == b"KSL1" + BODY


# Runs a migration whose system calls are counted, and dies before or after one of them.
KILLED = """
import os, sys
old, new, call, number, when = sys.argv[1:6]
real, left = getattr(os, call), int(number)
def deadly(*args, **kwargs):
    global left
    left -= 1
    if left == 0 and when == "before":
        os.kill(os.getpid(), 9)
    result = real(*args, **kwargs)
    if left == 0:
        os.kill(os.getpid(), 9)
    return result
from kslserve.ksl import migrate
setattr(os, call, deadly)
migrate.migrate(old, new)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("open", 1), ("pread", 1), ("pwrite", 1), ("fsync", 1), ("link", 1),
        ("fsync", 2),  # of the folder of the new name
        ("unlink", 1),
        ("fsync", 3),  # of that of the old one
    ],
)  # fmt: skip
def test_killed_at_each_step(old: Path, call: str, number: int, when: str) -> None:
    new = old.with_suffix(".ksl")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(old), str(new), call, str(number), when], check=False
    )
    assert done.returncode == -signal.SIGKILL
    found = {path.name: path.read_bytes() for path in old.parent.iterdir()}
    assert found, "the data is there under some name"
    assert set(found) <= {"model.tqf", "model.ksl"}
    for name, data in found.items():
        assert data[4:] == BODY
        assert data[:4] in ((b"KSL1",) if name == "model.ksl" else (b"TQF1", b"KSL1"))
    # what is left to do is to migrate, to rename, or to remove the old name
    if "model.ksl" not in found:
        if found["model.tqf"][:4] == b"TQF1":
            migrate(str(old), str(new))
        else:
            with pytest.raises(ModelFileError, match="only rename the file"):
                migrate(str(old), str(new))
            old.rename(new)
    assert new.read_bytes() == b"KSL1" + BODY
