"""Opening everything that serving needs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kslserve.config import Settings
from kslserve.errors import UsageError
from kslserve.sched.cache import diskstore
from kslserve.startup.backend import open_backend
from tests.unit.ksl.ksl_build import folder


@pytest.mark.parametrize("engine", ["native", "fake"])
def test_the_table_of_the_vocabulary_is_there_before_anybody_is_served(engine: str) -> None:
    """Building it holds the interpreter lock, so it must not happen beside streams."""
    backend = open_backend(Settings(engine=engine, kv_tokens=256, max_seqs=1), print)
    try:
        assert backend.grammars.built
        assert backend.grammars.words == (backend.engine.info.vocab + 31) // 32
    finally:
        backend.engine.close()


def test_without_a_tokenizer_there_is_none(tmp_path: Path) -> None:
    backend = open_backend(
        Settings(model=str(folder(tmp_path / "m")), kv_tokens=256, max_seqs=1), print
    )
    assert not backend.grammars.built
    backend.engine.close()


def test_a_folder_that_cannot_be_used_is_refused_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, reason in ((file, "File exists"), (file / "in", "Not a directory")):
        with pytest.raises(UsageError, match=f"--prefix-cache-dir {path} cannot be used: {reason}"):
            open_backend(Settings(model="/nonexistent", prefix_cache_dir=str(path)), print)

    def refuse(**options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(diskstore.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match="cannot be used: Read-only file system"):
        open_backend(Settings(model="/nonexistent", prefix_cache_dir=str(tmp_path / "new")), print)


@pytest.mark.parametrize("mode", ["off", "ngram", "mtp", "auto"])
def test_a_head_that_nothing_drafts_with_is_not_held(mode: str) -> None:
    with_head = mode in ("mtp", "auto")
    backend = open_backend(Settings(speculation=mode, kv_tokens=256, max_seqs=1), print)
    try:
        assert backend.engine.info.has_mtp is with_head
        assert any("MTP head" in line for line in backend.lines) is with_head
        assert (backend.drafts is None) is (mode == "off")
    finally:
        backend.engine.close()
