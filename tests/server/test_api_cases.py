"""Publicly reported faults of servers of this kind, against the whole server and a scripted
model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.api_cases import load_cases, run_case

CASES = Path(__file__).resolve().parents[1] / "data/cases"
FILES = ("api_chat.json", "api_messages.json", "api_responses.json")


@pytest.mark.parametrize(
    "case",
    [
        case
        for name in FILES
        for level in ("must", "should")
        for case in load_cases(CASES / name, level)
    ],
    ids=lambda case: case["id"],
)
def test_api(case: dict[str, Any], tmp_path: Path) -> None:
    run_case(case, tmp_path)
