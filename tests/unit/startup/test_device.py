"""Which backend serves, and what follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kslserve.config import Settings, load
from kslserve.engine import cuda
from kslserve.engine.budget import KV_OF
from kslserve.errors import EngineError, UsageError
from kslserve.startup import device
from kslserve.startup.device import open_library, place
from tests.tiny import tiny_spec

SPEC = tiny_spec()  # heads of 24 dimensions, which q4 does not take
ROUND = replace(SPEC, head_dim=64)


def settings(**flags: str) -> Settings:
    return load(flags, environ={}).settings


def test_auto_without_a_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_present", lambda: False)
    placed = place(settings(), SPEC)
    assert (placed.device, placed.kv) == ("cpu", "auto")


def test_the_format_on_a_device_follows_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "device_present", lambda: True)
    placed = place(settings(), SPEC)
    assert (placed.device, placed.kv) == ("cuda", "bf16")
    assert place(settings(), ROUND).kv == "q4"
    assert place(settings(kv="fp8"), ROUND).kv == "fp8"


def test_formats_that_cannot_work() -> None:
    with pytest.raises(UsageError, match="int8_g64 is not a format of --device cuda"):
        place(settings(device="cuda", kv="int8_g64"), ROUND)
    for kv in KV_OF["cpu"]:
        assert place(settings(device="cpu", kv=kv), ROUND).kv == kv
    with pytest.raises(UsageError, match="q4 takes heads of 32, 64, 128 or 256"):
        place(settings(device="cuda", kv="q4"), SPEC)


def test_a_missing_or_broken_library_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda, "find_library", lambda: None)
    with pytest.raises(EngineError, match=r"python build\.py cuda"):
        open_library(settings(device="cuda"))
    broken = tmp_path / cuda.LIBRARY
    broken.write_bytes(b"not a library")
    with pytest.raises(EngineError, match="cannot be loaded"):
        cuda.CudaLibrary(broken)


def test_a_device_that_cannot_be_used_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without a driver, or without one that is new enough."""
    library = SimpleNamespace(free_bytes=lambda: 0, problem=lambda: "no device is detected")
    monkeypatch.setattr(device, "open_library", lambda _: library)
    with pytest.raises(UsageError, match="cannot be used: no device is detected; --device cpu"):
        device.free_bytes(settings(device="cuda"))


def test_float_activations_are_had_on_either_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kslserve.engine.cuda.device_present", lambda: True)
    assert place(settings(activations="float"), SPEC).device == "cuda"
    assert place(settings(activations="float", device="cpu"), SPEC).device == "cpu"
