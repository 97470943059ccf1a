"""Cases of kind `engine`, each against servers of its own. A failing `should` case is reported as
an expected failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runners.engine_cases import run_engine
from tests.runners.files import named


@pytest.mark.parametrize("case", named("engine"), ids=lambda case: case["id"])
def test_case(case: dict[str, Any], tmp_path: Path) -> None:
    try:
        run_engine(case, tmp_path)
    except AssertionError as error:
        if case["level"] == "must":
            raise
        pytest.xfail(str(error))


def test_a_case_that_does_not_hold_fails(tmp_path: Path) -> None:
    """Every check that the other cases use can fail."""
    script = {"prefill_chunks": 2, "chunk_ms": 1, "decode_ms": 1, "tokens": 3}
    case: dict[str, Any] = {
        "id": "wrong",
        "server": [{"engine": "scripted"}],
        "runs": [{"as": name, "server": 0, "script": script} for name in ("a", "b")],
    }
    good = [
        ["status_in", "a", [200]],
        ["same_output", "a", "b"],
        ["at_least_distinct", ["a", "b"], 1],
        ["gt", "a.total_tokens", "a.prompt_tokens"],
        ["ge_fraction", "a.prompt_tokens", "b.prompt_tokens", 1.0],
        ["watchdog_trips", 0],
        ["blocks_free_at_end"],
        ["ended_counts_sum_to_started"],
    ]
    run_engine({**case, "expect": good}, tmp_path)
    for wrong in (
        ["status_in", "a", [400]],
        ["at_least_distinct", ["a", "b"], 2],
        ["gt", "a.prompt_tokens", 1000],
        ["ge_fraction", "a.prompt_tokens", "b.total_tokens", 1.0],
        ["no_such_check"],
    ):
        with pytest.raises(AssertionError):
            run_engine({**case, "expect": [wrong]}, tmp_path)
