"""Checkpoint files: whole or not at all, ours or nobody's."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kslserve.errors import UsageError
from kslserve.sched.cache import diskstore
from kslserve.sched.cache.checkpoint import Kind
from kslserve.sched.cache.diskstore import BadFile, DiskCopy, DiskStore, StateSizes

SIZES = StateSizes(b"a" * 32, slab_bytes=40, block_bytes=24, block_tokens=16)
TOKENS = np.arange(35, dtype=np.int32)


def images(seed: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, 40, np.uint8), [
        rng.integers(0, 256, 24, np.uint8) for _ in range(3)
    ]


def take(nbytes: int, count: int) -> list[np.ndarray]:
    return [np.empty(nbytes, np.uint8) for _ in range(count)]


def written(folder: Path, tokens: np.ndarray = TOKENS, sizes: StateSizes = SIZES) -> DiskCopy:
    return DiskStore(str(folder), sizes).write(tokens, Kind.STABLE, *images())


def test_there_and_back(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    copy = written(folder)
    store = DiskStore(str(folder), SIZES)
    scan = store.scan()
    (found,) = scan.found
    assert (found.kind, found.copy, scan.foreign, scan.bad) == (Kind.STABLE, copy, [], 0)
    assert np.array_equal(found.tokens, TOKENS)
    slab, blocks = store.read(copy, TOKENS, take)
    expected = images()
    assert np.array_equal(slab, expected[0])
    assert all(np.array_equal(a, b) for a, b in zip(blocks, expected[1], strict=True))
    store.remove(copy)
    store.remove(copy)
    assert store.scan().found == []


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    mask = os.umask(0)
    try:
        copy = written(folder)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(copy.path.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--prefix-cache-dir"):
        DiskStore(str(tmp_path / "file" / "cache"), SIZES)


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    copy = written(tmp_path)
    store = DiskStore(str(tmp_path), SIZES)
    for other in (TOKENS[:-1], TOKENS + 1, np.append(TOKENS, 1).astype(np.int32)):
        with pytest.raises(BadFile):
            store.read(copy, other, take)


@pytest.mark.parametrize(
    "sizes",
    [
        replace(SIZES, fingerprint=b"b" * 32),
        replace(SIZES, slab_bytes=41),
        replace(SIZES, block_bytes=23),
        replace(SIZES, block_tokens=32),
    ],
)
def test_other_models_are_refused(tmp_path: Path, sizes: StateSizes) -> None:
    copy = written(tmp_path)
    other = DiskStore(str(tmp_path), sizes)
    with pytest.raises(BadFile):
        other.read(copy, TOKENS, take)
    scan = other.scan()
    assert scan.found == []
    assert len(scan.foreign) + scan.bad == 1
    assert copy.path.exists()


def test_an_engine_without_a_head_reads_files_of_one_with_it(tmp_path: Path) -> None:
    """The other way round there is nothing to read. Where both are there, one is another's."""
    with_head = replace(SIZES, head=b"h" * 32)
    copy = written(tmp_path, sizes=with_head)
    plain = DiskStore(str(tmp_path), replace(SIZES, block_bytes=20))
    (found,) = plain.scan().found
    assert np.array_equal(found.tokens, TOKENS)
    slab, blocks = plain.read(found.copy, TOKENS, take)
    expected = images()
    assert np.array_equal(slab, expected[0])
    assert all(np.array_equal(a, b[:20]) for a, b in zip(blocks, expected[1], strict=True))
    short = [block[:20].copy() for block in expected[1]]
    own = plain.write(TOKENS, Kind.STABLE, expected[0], short)
    assert own.path != copy.path
    scan = plain.scan()
    assert (len(scan.found), len(scan.foreign), scan.bad) == (1, 1, 0)
    for sizes in (with_head, replace(SIZES, head=b"i" * 32)):
        scan = DiskStore(str(tmp_path), sizes).scan()
        assert [f.copy.path for f in scan.found] == ([copy.path] if sizes is with_head else [])
        assert (len(scan.found) + len(scan.foreign), scan.bad) == (2, 0)
        with pytest.raises(BadFile):
            DiskStore(str(tmp_path), sizes).read(own, TOKENS, take)


@pytest.mark.parametrize("help_bytes", [diskstore.HELP_BYTES, 1])
def test_every_damaged_byte_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, help_bytes: int
) -> None:
    """Also where a second thread reads half of a file."""
    monkeypatch.setattr(diskstore, "HELP_BYTES", help_bytes)
    copy = written(tmp_path)
    store = DiskStore(str(tmp_path), SIZES)
    whole = copy.path.read_bytes()
    for at in range(len(whole)):
        raw = bytearray(whole)
        raw[at] ^= 0x10
        copy.path.write_bytes(raw)
        with pytest.raises(BadFile):
            store.read(copy, TOKENS, take)
        store.scan()
    for size in (0, 7, 60, len(whole) - 1):
        copy.path.write_bytes(whole[:size])
        with pytest.raises(BadFile):
            store.read(copy, TOKENS, take)
        assert store.scan().bad == 1
    copy.path.write_bytes(whole + b"x")
    assert store.scan().bad == 1
    copy.path.write_bytes(whole)
    store.read(copy, TOKENS, take)


@pytest.mark.parametrize("batch_bytes", [1, 30, 50, 1000])
@pytest.mark.parametrize("block_bytes", [7, 64, 500])
def test_halves_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int, block_bytes: int
) -> None:
    """However images are put together and read, they come back as they were, and images that
    were exchanged do not."""
    monkeypatch.setattr(diskstore, "HELP_BYTES", 1)
    monkeypatch.setattr(diskstore, "BATCH_BYTES", batch_bytes)
    rng = np.random.default_rng(block_bytes)
    for n in (1, 2, 3, 9):
        sizes = replace(SIZES, block_bytes=block_bytes)
        store = DiskStore(str(tmp_path), sizes)
        tokens = np.arange(16 * n, dtype=np.int32)
        slab = rng.integers(0, 256, 40, np.uint8)
        blocks = [rng.integers(0, 256, block_bytes, np.uint8) for _ in range(n)]
        copy = store.write(tokens, Kind.STABLE, slab, blocks)
        read_slab, read_blocks = store.read(copy, tokens, take)
        assert np.array_equal(read_slab, slab)
        assert all(np.array_equal(a, b) for a, b in zip(read_blocks, blocks, strict=True))
        raw = copy.path.read_bytes()
        first = len(raw) - n * block_bytes
        for at in range(n - 1):
            begin, middle = first + at * block_bytes, first + (at + 1) * block_bytes
            end = middle + block_bytes
            other = raw[:begin] + raw[middle:end] + raw[begin:middle] + raw[end:]
            copy.path.write_bytes(other)
            with pytest.raises(BadFile, match="checksum"):
                store.read(copy, tokens, take)


def test_leftovers_links_and_strangers(tmp_path: Path) -> None:
    copy = written(tmp_path)
    store = DiskStore(str(tmp_path), SIZES)
    (tmp_path / "x.1.part").write_text("cut short")
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "link.kslckpt").symlink_to(copy.path)
    (tmp_path / "folder.kslckpt").mkdir()
    scan = store.scan()
    assert len(scan.found) == 1
    assert scan.bad == 2
    assert not (tmp_path / "x.1.part").exists()
    assert (tmp_path / "notes.txt").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(str(tmp_path), SIZES)

    def fail(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        store.write(TOKENS, Kind.STABLE, *images())
    assert list(tmp_path.iterdir()) == []


def test_the_same_tokens_have_one_file(tmp_path: Path) -> None:
    first, second = written(tmp_path), written(tmp_path)
    assert first.path == second.path
    assert len(list(tmp_path.iterdir())) == 1
    assert written(tmp_path, TOKENS[:30]).path != first.path
    assert written(tmp_path, TOKENS, replace(SIZES, fingerprint=b"c" * 32)).path != first.path
