"""The shared cases of kind `template`, for every generation."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.runners.files import named
from tests.runners.template_cases import TEMPLATES, run_template

CASES = named("template")


@pytest.mark.parametrize("version", TEMPLATES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(version: str, case: dict[str, Any]) -> None:
    run_template(case, version)


def test_a_case_that_does_not_hold_fails() -> None:
    wrong = copy.deepcopy(next(case for case in CASES if "prompt" in case["expect"]))
    wrong["expect"]["prompt"].append(["contains", "no prompt holds this"])
    with pytest.raises(AssertionError, match="no prompt"):
        run_template(wrong, "3.6")
