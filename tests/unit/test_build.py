"""What goes into a wheel beside the package."""

from __future__ import annotations

from pathlib import Path

import pytest

import build
from kslserve.engine.abi import source_digest


def test_only_a_current_cuda_library_is_packed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "BUILD", tmp_path)
    assert build._cuda_library() == []
    library = tmp_path / build.CUDA_LIBRARY
    library.write_bytes(b"of last week")
    assert build._cuda_library() == []
    assert "from other sources" in capsys.readouterr().err
    data = b"before " + source_digest(build.ROOT).encode() + b" after"
    library.write_bytes(data)
    assert build._cuda_library() == [("libksl_cuda.so", data)]
