"""What `--cpu-nice` costs and buys: decode rate, and the time from the end of a wave to the socket,
by nice value of the engine threads and number of busy processes at nice 0.

    python -m bench.priority [--model ksl-nano] [--streams 8] [--nice 0,5,10,15,19]
                             [--rivals 0,1,2] [--seconds 2] [--save]

Every token of a wave becomes an event of 200 bytes written to a socket by the loop that the engine
wakes, so `p99_us` is that of an event from engine to socket under full load; its target is 1 ms.
Rivals loop forever, as a compiler would for a while: in a session of their own, as in another
terminal, or in ours (`beside`). Where the kernel groups processes by session (`autogroup` 1), nice
values count only inside a group; where it does not, all rivals are like those in ours.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.cpu import BLOCK, setup
from bench.report import Report
from kslserve.app import new_loop
from kslserve.engine.model import PoolSizes
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import Done, Row, RowKind, Wave
from kslserve.ksl.open import open_model

EVENT = b"data: " + b"x" * 192 + b"\n\n"
CONTEXT = 512
ROOM = 16384


@contextmanager
def rivals(count: int, same_session: bool) -> Iterator[None]:
    """`count` processes that do nothing but compute."""
    found = [
        subprocess.Popen(
            [sys.executable, "-c", "while True: pass"], start_new_session=not same_session
        )
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()


def autogroup() -> int:
    """Whether the kernel groups processes by session; 0 where it cannot say."""
    try:
        return int(Path("/proc/sys/kernel/sched_autogroup_enabled").read_text())
    except (OSError, ValueError):
        return 0


class Load:
    """Sequences that decode without a pause. As in the scheduler, the next wave is submitted before
    the events of the last one are written."""

    def __init__(self, engine: NativeEngine, streams: int) -> None:
        self._engine = engine
        self._rows = [Row(RowKind.LAST, s, s, CONTEXT, 1, [11 + s]) for s in range(streams)]
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._there, self._there.recv, 1 << 20)
        self._waves = 0
        self._until = 0.0
        self._ended: asyncio.Future[None] | None = None
        self.tokens = 0
        self.late: list[float] = []  # microseconds from the end of a wave to the write of an event
        engine.start(self._on_done)

    async def run(self, seconds: float) -> float:
        """Tokens per second."""
        self.tokens, self.late = 0, []
        begun = time.monotonic()
        self._until = begun + seconds
        self._ended = self._loop.create_future()
        self._submit()
        await self._ended
        return self.tokens / (time.monotonic() - begun)

    def _submit(self) -> None:
        self._waves += 1
        wave = Wave(self._waves, rows=self._rows)
        if self._waves == 1:
            setup(wave, len(self._rows), (CONTEXT + ROOM) // BLOCK)
        assert self._engine.submit(wave)

    def _on_done(self, done: Done) -> None:
        assert done.error is None, done.error
        for row in self._rows:
            row.start, row.tokens = row.start + 1, [-1]
        full = self._rows[0].start == CONTEXT + ROOM
        if full or time.monotonic() > self._until:
            assert self._ended is not None
            self._ended.set_result(None)
        else:
            self._submit()
        for _ in self._rows:
            self._here.send(EVENT)
            self.late.append((time.monotonic_ns() - done.ended_ns) / 1e3)
        self.tokens += len(self._rows)

    def close(self) -> None:
        self._loop.remove_reader(self._there)
        self._here.close()
        self._there.close()
        self._engine.close()


async def measure(args: argparse.Namespace, report: Report) -> None:
    per_slot = (CONTEXT + ROOM) // BLOCK
    for nice in map(int, args.nice.split(",")):
        with open_model(args.model) as model:
            pools = PoolSizes(
                args.streams, args.streams, args.streams * per_slot, BLOCK, per_slot, 512
            )
            engine = NativeEngine.open(
                model.spec, model.tensors, pools, kv_format="bf16", nice=nice
            )
        work = Load(engine, args.streams)
        counts = [int(count) for count in args.rivals.split(",")]
        for count, beside in [(n, same) for n in counts for same in (False, True)[: 1 + bool(n)]]:
            with rivals(count, beside):
                await work.run(0.3)
                rate = await work.run(args.seconds)
            late = sorted(work.late)
            report.add(
                f"nice_{nice}_rivals_{count}" + "_beside" * beside, tok_s=rate,
                p50_us=late[len(late) // 2], p99_us=late[len(late) * 99 // 100], most_us=late[-1],
                of="1 ms at p99",
            )  # fmt: skip
        work.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ksl-nano")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--nice", default="0,5,10,15,19")
    parser.add_argument("--rivals", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    report = Report("priority")
    report.add("machine", autogroup=autogroup())
    new_loop().run_until_complete(measure(args, report))
    report.write(args.save)


if __name__ == "__main__":
    main()
