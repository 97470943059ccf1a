"""`python -m tests.cases`: what it prints and how it ends."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import RUNNERS, main
from tests.runners import files


def folder_of(path: Path, cases: list[dict[str, Any]]) -> list[str]:
    path.mkdir()
    (path / "some.json").write_text(json.dumps({"schema": 1, "cases": cases}))
    return [str(path)]


def test_every_kind_of_the_projects_cases_has_a_runner() -> None:
    paths = sorted(files.CASES.glob("*.json"))
    cases = [case for path in paths for case in files.read(path)]
    assert len(cases) == 126
    assert {case["kind"] for case in cases} <= RUNNERS.keys()
    assert len({case["id"] for case in cases}) == len(cases)


def test_lines_and_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {**files.named("stop")[0], "level": "must"}
    bad = copy.deepcopy(good)
    bad["id"], bad["expect"]["text"] = "bad", "no"
    unknown = {"id": "unknown", "kind": "some", "level": "should"}
    assert main(folder_of(tmp_path / "a", [good])) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed (0 of level must)"
    assert main(folder_of(tmp_path / "b", [good, {**bad, "level": "should"}, unknown])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["pass", "FAIL", "FAIL", "1"]
    assert "no runner for the kind 'some'" in lines[2]
    assert lines[-1] == "1 passed, 2 failed (0 of level must)"
    assert main(folder_of(tmp_path / "c", [good, bad])) == 1
    assert main(folder_of(tmp_path / "d", [])) == 1
    assert main([]) == main([str(tmp_path / "none")]) == 2


def test_one_case_of_each_kind_without_a_server(tmp_path: Path) -> None:
    names = ("parser_types", "stop", "bytes", "template", "sampling", "http")
    assert main(folder_of(tmp_path / "a", [files.named(name)[0] for name in names])) == 0
