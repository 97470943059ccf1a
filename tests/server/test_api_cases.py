"""Publicly reported faults of servers of this kind, against the whole server and a scripted
model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.api_cases import load_cases, run_case

CASES = Path(__file__).resolve().parents[1] / "data/cases/api_chat.json"


@pytest.mark.parametrize(
    "case", load_cases(CASES, "must") + load_cases(CASES, "should"), ids=lambda case: case["id"]
)
def test_chat(case: dict[str, Any], tmp_path: Path) -> None:
    run_case(case, tmp_path)
