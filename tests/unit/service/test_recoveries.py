"""Recovered calls are counted, and collected in a bounded file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kslserve.errors import UsageError
from kslserve.metrics import Metrics
from kslserve.parse.stream import Recovery
from kslserve.service import recoveries
from kslserve.service.recoveries import Recoveries
from tests.unit.parse.parse_support import strings

TOOLS = (strings("Read", "path"), strings("Write", "path", "content"))


def test_without_a_file_they_are_counted_only() -> None:
    metrics = Metrics()
    counted = Recoveries(metrics)
    assert not counted.keep_text
    counted.took([Recovery("json", []), Recovery("json", []), Recovery("chimera", [])], TOOLS)
    counted.close()
    assert 'kslserve_toolcall_recoveries_total{family="json"} 2' in metrics.render()
    assert 'kslserve_toolcall_recoveries_total{family="chimera"} 1' in metrics.render()


def test_the_file_grows_by_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("{}\n")
    kept = Recoveries(Metrics(), str(path))
    assert kept.keep_text
    kept.took([Recovery("json", ['{"name"', ': "é\ud800"}'])], TOOLS)
    kept.took([], TOOLS)
    kept.took([Recovery("chimera", ["a\nb"])], ())
    kept.close()
    assert list(map(json.loads, path.read_text().splitlines())) == [
        {},
        {"family": "json", "tools": ["Read", "Write"], "text": '{"name": "é\ud800"}'},
        {"family": "chimera", "tools": [], "text": "a\nb"},
    ]


def test_a_full_file_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recoveries, "CORPUS_BYTES_MAX", 150)
    metrics = Metrics()
    kept = Recoveries(metrics, str(tmp_path / "corpus"))
    for _ in range(5):
        kept.took([Recovery("json", ["text"])], ())
    kept.close()
    assert len((tmp_path / "corpus").read_text().splitlines()) == 3
    assert metrics.counter("drift_corpus_dropped_total", "").value == 2


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--drift-corpus"):
        Recoveries(Metrics(), str(tmp_path / "no" / "corpus"))
