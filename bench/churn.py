"""Hours of agents' traffic in minutes, on a full-size model with every tier of the prefix cache:
in the end nothing may be held that was free before, and memory may not have grown.

    python -m bench.churn [--seconds 120] [--warm-up 40] [--every 5] [--most 60000]
                          [--host-bytes 256MiB] [--save] [-- FLAGS]

FLAGS go to the server; by default it serves `synth:27b` in NVFP4 on the CUDA device. Of sixteen
clients twelve have conversations of their own, which grow to --most tokens, are left and begun
anew; four send again what real clients sent (tests/data/clients), capture by capture, in every
dialect. One request in seven is left in the middle. The server has fewer blocks than all of that
needs, and a host tier that fills in the warm-up. From then on memory is read at even intervals,
while requests run: each reading is printed, `growth` is what a line through them says of a minute,
and `late` the median of the last third over that of the first. On the CPU the pools are host memory
too, whose pages come as they are first written: small ones (--kv-tokens) are full in the warm-up.
Exit status 1 where something is still held or a request was refused.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import itertools
import json
import random
import statistics
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.apc import Message, Server, Texts, ask
from bench.at_size import DEFAULT_FLAGS, gaps_of, health
from bench.replay import CLIENTS as CAPTURES
from bench.replay import send, usage_of
from bench.report import Report

CLIENTS, CAPTURED = 16, 4
LEFT = 0.15  # requests whose client hangs up
SETTLE_S = 30
MIN_READINGS = 6
ALL_FREE = ("slots_free", "blocks_free", "running", "queued")


def settled(server: Server) -> dict[str, Any]:
    """The scheduler's counts once nothing runs, or after SETTLE_S seconds."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        found: dict[str, Any] = health(server)["scheduler"]
        if not found["running"] + found["queued"] or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def device_mib() -> int:
    """Memory in use on the device; 0 where it cannot be asked."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(out.split()[0])


def host_mib(server: Server) -> int:
    """Memory of the server's process that no other has, without the host tier's images."""
    tier = int(health(server)["scheduler"]["cache"]["host_bytes"]) // 2**20
    for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) // 1024 - tier
    return 0


class Traffic:
    """What all clients do until `end`, and what came of it."""

    def __init__(self, server: Server, seconds: float, most: int) -> None:
        self.server = server
        self.end = time.monotonic() + seconds
        self.most = most
        self.counts = {"requests": 0, "left": 0, "refused": 0, "prompt": 0, "cached": 0}
        self._texts = Texts(seed=5)
        self._lock = threading.Lock()

    def client(self, number: int) -> None:
        rng = random.Random(number)
        if number < CAPTURED:
            self._captured(rng)
        else:
            self._own(rng)

    def _count(self, **figures: int) -> None:
        with self._lock:
            for name, value in figures.items():
                self.counts[name] += value

    def _own(self, rng: random.Random) -> None:
        messages: list[Message] = []
        while time.monotonic() < self.end:
            if not messages:
                with self._lock:
                    messages = self._texts.conversation(rng.randrange(500, 6000))
            if rng.random() < LEFT:
                stop = threading.Event()
                threading.Timer(rng.random(), stop.set).start()
                gaps_of(self.server, messages, 400, stop)
                self._count(left=1)
                continue
            answer = ask(self.server, messages, rng.randrange(4, 120))
            size = int(answer.usage["prompt_tokens"])
            self._count(requests=1, prompt=size, cached=answer.cached)
            with self._lock:
                grown = self._texts.follow(messages, answer, rng.choice((50, 200, 2000)))
            messages = grown if size < self.most and rng.random() < 0.93 else []

    def _captured(self, rng: random.Random) -> None:
        paths = sorted(CAPTURES.glob("*.json.gz"))
        while True:
            path = rng.choice(paths)
            for request in json.loads(gzip.decompress(path.read_bytes()))["requests"]:
                if time.monotonic() > self.end:
                    return
                if rng.random() < LEFT:
                    self._leave(request, rng.random())
                    continue
                status, text = send(
                    self.server, request["path"], request["body"], rng.randrange(4, 60)
                )
                if status != 200:
                    print(f"{path.name}: {status} {text[:200]}", flush=True)
                    self._count(refused=1)
                elif "count_tokens" not in request["path"]:
                    prompt, cached = usage_of(text)
                    self._count(requests=1, prompt=prompt, cached=cached)

    def _leave(self, request: dict[str, Any], patience: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", request["path"], json.dumps(request["body"]), headers)
        time.sleep(patience)
        connection.close()
        self._count(left=1)


class Memory:
    """Readings of the server's memory at even intervals from `begin` on, by a thread of its own."""

    def __init__(self, server: Server, begin: float, end: float, every: float) -> None:
        self._server, self._begin, self._end, self._every = server, begin, end, every
        self.readings: list[tuple[float, int, int]] = []  # seconds, host MiB, device MiB

    def watch(self) -> None:
        for number in itertools.count():
            at = self._begin + number * self._every
            if at > self._end:
                return
            time.sleep(max(0.0, at - time.monotonic()))
            reading = (number * self._every, host_mib(self._server), device_mib())
            self.readings.append(reading)
            print("after {:4.0f} s: host {} MiB, device {} MiB".format(*reading), flush=True)

    def figures(self) -> dict[str, float]:
        """MiB at first, growth a minute, and the last third over the first."""
        if len(self.readings) < MIN_READINGS:
            raise SystemExit("churn: too few readings: more --seconds, or fewer --every.")
        seconds, *kinds = zip(*self.readings, strict=True)
        found: dict[str, float] = {}
        third = len(seconds) // 3
        for name, values in zip(("host", "device"), kinds, strict=True):
            slope = statistics.linear_regression(seconds, values).slope
            late = statistics.median(values[-third:]) - statistics.median(values[:third])
            found |= {
                f"{name}_mib": values[0], f"{name}_growth_mib_min": 60 * slope,
                f"{name}_late_mib": late,
            }  # fmt: skip
        return found


def churn(report: Report, server: Server, args: argparse.Namespace) -> bool:
    """Whether everything was served and is free again."""
    before = settled(server)
    traffic = Traffic(server, args.seconds, args.most)
    memory = Memory(server, traffic.end - args.seconds + args.warm_up, traffic.end, args.every)
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        jobs = [pool.submit(traffic.client, number) for number in range(CLIENTS)]
        jobs.append(pool.submit(memory.watch))
        for job in jobs:
            job.result()
    after = settled(server)
    kept = {name: after[name] - before[name] for name in ALL_FREE}
    counts, cache = traffic.counts, after["cache"]
    report.add(
        "churn", seconds=args.seconds, **counts,
        shared=counts["cached"] / max(counts["prompt"], 1),
        **{f"{name}_change": value for name, value in kept.items()}, **memory.figures(),
        host_tier_mib=cache["host_bytes"] / 2**20, disk_mib=cache["disk_bytes"] / 2**20,
        reads=cache["reads"], last_error=after["last_error"],
    )  # fmt: skip
    return not any(kept.values()) and not counts["refused"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--warm-up", type=float, default=40, help="seconds before memory is read")
    parser.add_argument("--every", type=float, default=5, help="seconds between readings")
    parser.add_argument("--host-bytes", default="256MiB", help="of the host tier")
    parser.add_argument("--most", type=int, default=60000, help="tokens of a conversation")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    report = Report("churn")
    # A conversation ends beyond --most; captures have up to 40,000.
    window = max(args.most, 49152) + 8192
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            "--context", str(window), "--kv-tokens", str(5 * window), "--max-seqs", "8",
            "--prefix-cache-host-bytes", args.host_bytes, "--prefix-cache-dir", folder,
            *(args.flags or DEFAULT_FLAGS),
        )  # fmt: skip
        try:
            right = churn(report, server, args)
        finally:
            server.stop()
    report.write(args.save)
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
