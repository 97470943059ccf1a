"""Fuzzing of what clients and models write: attempt number i of a target is a function of its name
and i, so a failure is repeated by its number.

    python -m tests.fuzz.loop TARGET SECONDS [FIRST]

runs one target from attempt FIRST on. The targets are those of tests.fuzz.online.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

Attempt = Callable[[random.Random], None]
ATTEMPTS_MIN = 50


def run(name: str, attempt: Attempt, seconds: float, first: int = 0) -> int:
    """Make attempts until the time is over; how many there were."""
    end = time.monotonic() + seconds
    count = 0
    while count < ATTEMPTS_MIN or time.monotonic() < end:
        number = first + count
        try:
            attempt(random.Random(f"{name}:{number}"))
        except BaseException as error:
            raise AssertionError(f"{name}: attempt {number}") from error
        count += 1
    print(f"{name}: {count} attempts")  # pytest -s
    return count


def main(target: str, seconds: float, first: int = 0) -> None:
    from tests.fuzz.online import TARGETS

    run(target, TARGETS[target], seconds, first)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:]))
