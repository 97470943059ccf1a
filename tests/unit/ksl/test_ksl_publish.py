"""New files: room is taken first, and what the disk refuses at any time is one sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kslserve.errors import ModelFileError
from kslserve.ksl import publish
from kslserve.ksl.convert import convert
from kslserve.ksl.publish import NewFile
from tests.unit.ksl.ksl_build import folder

START = b"x" * 64


def test_a_full_disk_is_known_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work(*_: object) -> None:
        raise AssertionError("nothing is encoded for a disk that is full")

    source = folder(tmp_path / "m")
    monkeypatch.setattr("os.posix_fallocate", full)
    monkeypatch.setattr("kslserve.ksl.quantize.encode_piece", work)
    for file_format in ("container", "ksl1"):
        monkeypatch.setattr("kslserve.ksl.ksl1_records.check_tiles", lambda record, where: None)
        with pytest.raises(ModelFileError, match=r"x\.ksl: No space left on device\.$"):
            convert(str(source), str(tmp_path / "x.ksl"), file_format=file_format)
    assert os.listdir(tmp_path) == ["m"]


def test_room_is_no_condition_where_it_cannot_be_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(handle: int, start: int, size: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("os.posix_fallocate", unknown)
    with NewFile(str(tmp_path / "x")) as file:
        file.reserve(100)
        file.put(64, b"y" * 36)
        file.publish(START, 100)
        file.link()
    assert (tmp_path / "x").read_bytes() == START + b"y" * 36


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_an_error_of_the_disk_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """The system reports an error to one fsync only, whichever comes first."""
    monkeypatch.setattr(publish, "SYNC_BYTES", 1000)
    calls, real = 0, os.fsync

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(handle)

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(ModelFileError, match=r"cannot write .*x: Input/output error\.$"):
        _write(str(tmp_path / "x"))
    assert calls >= failing
    assert os.listdir(tmp_path) == []


def _write(path: str) -> None:
    with NewFile(path) as file:
        for number in range(4):
            file.put(64 + 1000 * number, bytes(1000))
        file.publish(START, 4064)
        file.link()
