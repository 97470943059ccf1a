"""Watchdog: stalls of waves are told once; a stalled loop ends the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass

from kslserve.watchdog import Watchdog


@dataclass
class Counters:
    submitted: int = 0
    started: int = 0
    completed: int = 0


class Bench:
    def __init__(self, wave_s: float = 2.0) -> None:
        self.now = 0.0
        self.counters = Counters()
        self.stalls: list[str] = []
        self.watchdog = Watchdog(0.0, wave_s, self.stalls.append, clock=lambda: self.now)
        self.watchdog.watch(lambda: self.counters)

    def after(self, seconds: float) -> int:
        self.now += seconds
        self.watchdog.check()
        return len(self.stalls)


def test_idle_is_no_stall() -> None:
    bench = Bench()
    assert bench.after(1000) == 0


def test_progress_is_no_stall() -> None:
    bench = Bench()
    for _ in range(10):
        bench.counters.submitted += 1
        assert bench.after(0.5) == 0
        bench.counters.started += 1
        assert bench.after(1.5) == 0
        bench.counters.completed += 1
        assert bench.after(1.5) == 0


def test_a_wave_after_a_long_rest_has_its_whole_time() -> None:
    bench = Bench()
    bench.after(1000)
    bench.counters.submitted = 1
    assert bench.after(1.9) == 0
    assert bench.after(0.2) == 1


def test_a_stall_is_told_once() -> None:
    bench = Bench()
    bench.counters.submitted = bench.counters.started = 1
    bench.after(0.1)
    assert bench.after(2.5) == 1
    assert bench.after(2.5) == 1
    assert "2.5 s" in bench.stalls[0]


def test_without_a_deadline_nothing_is_a_stall() -> None:
    bench = Bench(wave_s=0.0)
    bench.counters.submitted = 1
    assert bench.after(1e9) == 0


async def test_it_looks_by_itself() -> None:
    stalled = asyncio.get_running_loop().create_future()
    watchdog = Watchdog(0.0, 0.01, stalled.set_result)
    watchdog.watch(lambda: Counters(submitted=1))
    watchdog.start()
    assert "progressed" in await asyncio.wait_for(stalled, 10)
    watchdog.stop()


STUCK_LOOP = """
import asyncio, time
from kslserve.watchdog import Watchdog

async def main():
    watchdog = Watchdog(0.2, 0.0, print)
    watchdog.start()
    await asyncio.sleep(0.5)
    print("alive", flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def test_a_stuck_loop_ends_the_process_with_its_stacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK_LOOP], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "alive\n"
    assert "in main" in done.stderr


STUCK_SERVER = """
import asyncio, time
from kslserve.app import App
from kslserve.config import Settings

async def main():
    app = App(Settings(engine="fake", port=0, context=1024, watchdog_loop_s=1.0))
    await app.start()
    time.sleep(60)

asyncio.run(main())
"""


def test_a_server_has_the_deadline_of_its_settings() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK_SERVER], capture_output=True, text=True, timeout=50,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "in main" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("ready")
