"""A short run of every fuzzing target; `--fuzz-seconds` sets how long."""

from __future__ import annotations

import json
import random

import pytest

from kslserve.core.usage import FinishReason
from tests.fuzz.loop import ATTEMPTS_MIN, run
from tests.fuzz.online import READERS, SEEDS, TARGETS, TOOLS, check_cuts, read_or_refuse


@pytest.mark.parametrize("target", TARGETS)
def test_target(target: str, fuzz_seconds: float) -> None:
    assert run(target, TARGETS[target], fuzz_seconds) >= ATTEMPTS_MIN


def test_a_failure_names_its_attempt() -> None:
    def attempt(rng: random.Random) -> None:
        assert rng.random() < 0.9

    with pytest.raises(AssertionError, match=r"^some: attempt \d+$") as first:
        run("some", attempt, 0)
    number = int(str(first.value).rpartition(" ")[2])
    with pytest.raises(AssertionError, match=f"attempt {number}$"):
        run("some", attempt, 0, number)


@pytest.mark.parametrize("name", READERS)
def test_bodies_that_were_found(name: str) -> None:
    for body in (*SEEDS["bodies"][name], *SEEDS["found"].get(name, ())):
        read_or_refuse(READERS[name], json.dumps(body).encode())


@pytest.mark.parametrize(("text", "thinking"), SEEDS["found"]["parser"])
def test_outputs_that_were_found(text: str, thinking: bool) -> None:
    for tools in TOOLS:
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            check_cuts(text, [1, 7, len(text) // 2], tools, thinking=thinking, reason=reason)
