"""Every reader of model files against damaged and hostile files: one sentence, or a model that can
be read to the last byte; never anything else. `--fuzz-seconds` sets how long each takes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kslserve.errors import UsageError
from kslserve.ksl import container, policy, report
from kslserve.ksl.model import read_texts
from kslserve.ksl.open import open_model, open_source
from kslserve.ksl.safetensors import SafetensorsFile
from tests.fuzz.driver import SEEDS, fuzz, seeds


def read_all(path: str) -> None:
    """What serving does short of the engine, and every stored byte."""
    source = open_source(path)
    try:
        read_texts(source)
        policy.plan(source)
        for name in source.stored:
            source.read(name)
    finally:
        source.close()


def describe(path: str) -> None:
    found = report.describe(path)
    assert found["parameters"] > 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model folder, made of the seeds."""
    path = tmp_path / "model"
    path.mkdir()
    for kind in ("text-", "folder-"):
        for seed in SEEDS.glob(f"{kind}*"):
            shutil.copy(seed, path / seed.name.removeprefix(kind))
    read_all(str(path))
    return path


@pytest.mark.parametrize("kind", ["ksl1", "container"])
def test_files(tmp_path: Path, kind: str, fuzz_seconds: float) -> None:
    path = tmp_path / "m.ksl"
    count = 0

    def attempt(data: bytes) -> None:
        nonlocal count
        path.write_bytes(data)
        count += 1
        if count % 8 == 0:
            open_model(str(path)).close()
        elif count % 8 == 1:
            describe(str(path))
        elif count % 8 == 2 and kind == "container":
            container.verify(str(path))
        else:
            read_all(str(path))

    fuzz(kind, seeds(f"{kind}-*"), attempt, fuzz_seconds)


def test_safetensors(tmp_path: Path, fuzz_seconds: float) -> None:
    path = tmp_path / "x.safetensors"

    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        file = SafetensorsFile(str(path))
        try:
            for name in file.entries:
                entry = file.entries[name]
                assert file.data(name).nbytes == entry.end - entry.start
        finally:
            file.close()

    fuzz("safetensors", seeds("folder-*"), attempt, fuzz_seconds)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("folder-", "model.safetensors"),
        ("index-", "model.safetensors.index.json"),
        ("text-", "config.json"),
        ("text-", "tokenizer.json"),
        ("text-", "generation_config.json"),
    ],
)
def test_folders(folder: Path, kind: str, name: str, fuzz_seconds: float) -> None:
    path = folder / name
    count = 0

    def attempt(data: bytes) -> None:
        nonlocal count
        path.write_bytes(data)
        count += 1
        (read_all if count % 4 else describe)(str(folder))

    fuzz(f"{kind}{name}", seeds(f"{kind}{name}*"), attempt, fuzz_seconds)


@pytest.mark.parametrize("kind", ["empty", "folder", "zeros", "spaces"])
def test_other_things(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.ksl"
    if kind == "folder":
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "zeros": bytes(5000), "spaces": b" " * 5000}[kind])
    for read in (read_all, describe):
        with pytest.raises(UsageError) as caught:
            read(str(path))
        assert caught.value.message.endswith(".")
