"""The file of generated turns: what it gives back, what it refuses, its bounds."""

from __future__ import annotations

import logging
import stat
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kslserve.core.request import ToolCall
from kslserve.service.echo import Turn
from kslserve.service.turnstore import SHARE, SUFFIX, Kept, TurnStore

PRINT = bytes(range(32))
OTHER = bytes(range(1, 33))
ROOM = 2 * SHARE << 20


def store(folder: Path, fingerprint: bytes = PRINT, disk_bytes: int = ROOM) -> TurnStore:
    return TurnStore(folder, fingerprint, disk_bytes)


def turn(n: int, text: str = "Done.", **arguments: Any) -> Turn:
    calls = (ToolCall(f"call_{n}", "write", arguments),) if arguments else ()
    return Turn(np.arange(n, n + 5, dtype=np.int32), text, f"Step {n}.", calls)


def value(entry: Kept) -> tuple[Any, ...]:
    kept, context = entry
    return kept.ids.tolist(), kept.text, kept.reasoning, kept.calls, context


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*" + SUFFIX)
    return path


def test_turns_come_back_in_order(tmp_path: Path) -> None:
    turns = [turn(1), turn(2, path="a\n", lines=[1, 2.5, None]), turn(3, "\ud800 \U0001f600")]
    for at, entry in enumerate(turns):
        store(tmp_path).append(entry, bytes([at]) * 16)
    found = store(tmp_path).load()
    expected = [value((entry, bytes([at]) * 16)) for at, entry in enumerate(turns)]
    assert [value(entry) for entry in found] == expected
    assert found[0][0].ids.dtype == np.int32
    assert stat.S_IMODE(file_of(tmp_path).stat().st_mode) == 0o600


def test_a_first_start_finds_nothing(tmp_path: Path) -> None:
    assert store(tmp_path).load() == []
    assert list(tmp_path.iterdir()) == []


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_damaged_is_dropped(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for n in range(4):
            store(folder).append(turn(n), b"c" * 16)
        path = file_of(folder)
        whole = path.read_bytes()
        before = [value(entry) for entry in store(folder).load()]
        if data.draw(st.booleans()):
            path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        else:
            at = data.draw(st.integers(0, len(whole) - 1))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        found = [value(entry) for entry in store(folder).load()]
        assert found == before[: len(found)]
        assert len(found) < 4
        # What was damaged is gone, and the file goes on.
        store(folder).append(turn(9), b"d" * 16)
        after = [value(entry) for entry in store(folder).load()]
        assert after == [*found, value((turn(9), b"d" * 16))]


def test_another_models_file_is_let_alone(tmp_path: Path) -> None:
    store(tmp_path, OTHER).append(turn(1), b"")
    assert store(tmp_path).load() == []
    assert len(store(tmp_path, OTHER).load()) == 1


def test_a_foreign_file_under_our_name_is_ignored_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(tmp_path).append(turn(1), b"")
    path = file_of(tmp_path)
    path.write_bytes(b"something else entirely" * 9)
    with caplog.at_level(logging.WARNING):
        assert store(tmp_path).load() == []
    assert len(caplog.records) <= 1
    store(tmp_path).append(turn(2), b"")
    assert [entry[0].text for entry in store(tmp_path).load()] == ["Done."]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "cache", tmp_path / "outside"
    folder.mkdir()
    store(folder).append(turn(1), b"")
    path = file_of(folder)
    outside.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(OSError, match="symbolic links"):
        store(folder).append(turn(2), b"")
    assert store(folder).load() == []
    assert outside.exists()


def test_the_file_stays_in_its_budget_and_keeps_what_is_new(tmp_path: Path) -> None:
    small = store(tmp_path, disk_bytes=2 * SHARE * 4000)
    assert small.max_bytes == 4000
    for n in range(60):
        small.append(turn(n), b"c" * 16)
        assert file_of(tmp_path).stat().st_size <= 4000
    numbers = [int(entry[0].ids[0]) for entry in small.load()]
    assert numbers == list(range(numbers[0], 60))
    assert len(numbers) > 5
    small.append(turn(60, "x" * 5000), b"")
    assert [int(entry[0].ids[0]) for entry in small.load()] == numbers


def test_files_of_many_models_are_bounded(tmp_path: Path) -> None:
    for n in range(6):
        one = store(tmp_path, bytes([n]) * 32, 2 * SHARE * 1000)
        for _ in range(3):
            one.append(turn(n), b"c" * 16)
    store(tmp_path, disk_bytes=2 * SHARE * 1000).load()
    assert sum(path.stat().st_size for path in tmp_path.glob("*" + SUFFIX)) <= 1000
