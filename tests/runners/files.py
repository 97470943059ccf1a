"""Case files: JSON `{"schema": 1, "cases": [...]}`; a case has an `id`, a `kind` and a `level`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Case = dict[str, Any]
CASES = Path(__file__).resolve().parents[1] / "data" / "cases"


def read(path: Path) -> list[Case]:
    """The cases of one file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("schema") != 1:
        raise ValueError(f"{path} is no file of cases with schema 1")
    cases: list[Case] = document["cases"]
    return cases


def named(*names: str) -> list[Case]:
    """The project's own cases of these files, named without their ending."""
    return [case for name in names for case in read(CASES / f"{name}.json")]


def outcomes(case: Case) -> list[Any]:
    """What is expected, and what else is accepted."""
    return [case["expect"], *({**case["expect"], **other} for other in case.get("accept", ()))]
