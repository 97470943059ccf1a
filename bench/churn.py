"""Hours of agents' traffic in minutes, on a full-size model with every tier of the prefix cache:
in the end nothing may be held that was free before, and memory may not have grown.

    python -m bench.churn [--cycles 10] [--seconds 3] [--warm-up 2] [--most 60000]
                          [--host-bytes 256MiB] [--save] [-- FLAGS]

FLAGS go to the server; by default it serves `synth:27b` in NVFP4 on the CUDA device. Of sixteen
clients twelve have conversations of their own, which grow to --most tokens, are left and begun
anew; four send again what real clients sent (tests/data/clients), capture by capture, in every
dialect. One request in seven is left in the middle. The server has fewer blocks than all of that
needs. Traffic comes in cycles of --seconds each; behind each of them, when nothing runs, memory is
read: of the device, and of the server's process without large mappings (images of the host tier,
which have a budget and are counted, and pools), without remembered texts and without the tokens of
known prefixes, which have bounds and are counted too (`text_bytes`, `path_bytes`). --warm-up cycles
are for pools to fill.

A plane through the other readings says how much memory grew over all of them by itself, how much
with every launch in the graphs that the device keeps (`graphs_mib`: of all of them), of which there
is a bound and a place in the memory plan, and how far off that growth may be (two standard errors).
`flat` is memory that grew by no more than LIMIT_MIB with the error added: growth and readings too
wild to say are both `not flat`. Exit status 1 for that, and where something is still held or a
request was refused.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import random
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.apc import Message, Server, Texts, ask
from bench.at_size import DEFAULT_FLAGS, gaps_of, health
from bench.replay import CLIENTS as CAPTURES
from bench.replay import send, usage_of
from bench.report import Report

CLIENTS, CAPTURED = 16, 4
LEFT = 0.15  # requests whose client hangs up
SETTLE_S = 30
MIN_READINGS = 6
LIMIT_MIB = 16
ARENA, LARGE = 64 << 20, 8 << 20  # of the allocator; mappings that are not counted
ALL_FREE = ("slots_free", "blocks_free", "running", "queued")


def settled(server: Server) -> dict[str, Any]:
    """The scheduler's counts once nothing runs, or after SETTLE_S seconds."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        told = health(server)
        found: dict[str, Any] = told["scheduler"] | {"text_bytes": told["text_bytes"]}
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


MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)")


def host_mib(smaps: str) -> float:
    """Anonymous memory of a process without its large mappings. smaps: what the system tells of
    it. Heaps that the allocator makes for threads are none of those, however large: they begin at
    multiples of ARENA, and what they do not use yet lies behind them, without access."""
    total = 0
    mappings = [*MAPPING.finditer(smaps)]
    for this, after in zip(mappings, [*mappings[1:], None], strict=True):
        begin, end = int(this[1], 16), int(this[2], 16)
        rest = after is not None and after[3] == "---p" and int(after[1], 16) == end
        arena = begin % ARENA == 0 and (rest or end - begin == ARENA)
        if end - begin >= LARGE and not this[4] and not arena:
            continue
        text = smaps[this.end() : after.start() if after else len(smaps)]
        total += sum(int(kib) for kib in re.findall(r"^Anonymous: +(\d+) kB", text, re.MULTILINE))
    return total / 1024


class Traffic:
    """What all clients do in a cycle, going on from the one before, and what came of it."""

    def __init__(self, server: Server, seconds: float, most: int) -> None:
        self.server = server
        self.seconds = seconds
        self.most = most
        self.counts = {"requests": 0, "left": 0, "refused": 0, "prompt": 0, "cached": 0}
        self._end = 0.0
        self._texts = Texts(seed=5)
        self._rngs = [random.Random(number) for number in range(CLIENTS)]
        self._talks: list[list[Message]] = [[] for _ in range(CLIENTS)]
        self._lock = threading.Lock()

    def cycle(self) -> None:
        self._end = time.monotonic() + self.seconds
        with ThreadPoolExecutor(CLIENTS) as pool:
            for job in [pool.submit(self._client, number) for number in range(CLIENTS)]:
                job.result()

    def _client(self, number: int) -> None:
        rng = self._rngs[number]
        if number < CAPTURED:
            self._captured(rng)
        else:
            self._talks[number] = self._own(rng, self._talks[number])

    def _count(self, **figures: int) -> None:
        with self._lock:
            for name, value in figures.items():
                self.counts[name] += value

    def _own(self, rng: random.Random, messages: list[Message]) -> list[Message]:
        while time.monotonic() < self._end:
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
        return messages

    def _captured(self, rng: random.Random) -> None:
        paths = sorted(CAPTURES.glob("*.json.gz"))
        while True:
            path = rng.choice(paths)
            for request in json.loads(gzip.decompress(path.read_bytes()))["requests"]:
                if time.monotonic() > self._end:
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


@dataclass(frozen=True, slots=True)
class Reading:
    """Behind a cycle. host, device: MiB. kernels: launches in the graphs that are kept."""

    host: float
    device: float
    kernels: int


@dataclass(frozen=True, slots=True)
class Trend:
    """growth: of values at even distances, from the first to the last one, beside what graphs took:
    `kernel` for each launch in them. error: two standard errors of growth."""

    growth: float
    error: float
    kernel: float

    @property
    def flat(self) -> bool:
        return self.growth + self.error <= LIMIT_MIB


def trend(values: Sequence[float], kernels: Sequence[int]) -> Trend:
    n = len(values)
    if n < MIN_READINGS:
        raise SystemExit(f"churn: {MIN_READINGS} cycles at least have to follow the warm-up.")
    x, y = np.stack([np.ones(n), np.arange(n), np.array(kernels)], 1), np.array(values)
    if np.linalg.matrix_rank(x) < 3:  # none came, or as many in every cycle
        x = x[:, :2]
    inverse = np.linalg.inv(x.T @ x)
    line = inverse @ x.T @ y
    spread = ((y - x @ line) ** 2).sum() / (n - len(line)) * inverse[1, 1]
    growth, kernel = float(line[1]) * (n - 1), float(line[2]) if len(line) > 2 else 0.0
    return Trend(growth, 2 * (n - 1) * float(spread) ** 0.5, kernel)


def churn(report: Report, server: Server, args: argparse.Namespace) -> bool:
    """Whether everything was served and is free again, and memory is flat."""
    before = settled(server)
    traffic = Traffic(server, args.seconds, args.most)
    readings: list[Reading] = []
    for number in range(args.warm_up + args.cycles):
        traffic.cycle()
        after = settled(server)
        smaps = Path(f"/proc/{server.process.pid}/smaps").read_text(encoding="utf-8")
        texts, paths = after["text_bytes"] / 2**20, after["cache"]["path_bytes"] / 2**20
        host = host_mib(smaps) - texts - paths
        reading = Reading(host, device_mib(), after["graph_kernels"])
        print(
            f"cycle {number}: {traffic.counts['requests']} requests, host {reading.host:.1f} MiB, "
            f"texts {texts:.1f}, paths {paths:.1f}, images {after['cache']['image_bytes'] >> 20}, "
            f"device {reading.device} MiB, graphs {after['graphs']} of {after['graphs_made']} "
            f"with {reading.kernels} launches", flush=True,
        )  # fmt: skip
        if number >= args.warm_up:
            readings.append(reading)
    kept = {name: after[name] - before[name] for name in ALL_FREE}
    counts, cache = traffic.counts, after["cache"]
    report.add(
        "churn", cycles=args.cycles, seconds=args.seconds, **counts,
        shared=counts["cached"] / max(counts["prompt"], 1),
        **{f"{name}_change": value for name, value in kept.items()},
        host_tier_mib=cache["host_bytes"] / 2**20, images_mib=cache["image_bytes"] / 2**20,
        disk_mib=cache["disk_bytes"] / 2**20, reads=cache["reads"], writes=cache["writes"],
        graphs=after["graphs"], graphs_made=after["graphs_made"], last_error=after["last_error"],
    )  # fmt: skip
    right = not any(kept.values()) and not counts["refused"]
    kernels = [reading.kernels for reading in readings]
    for name in ("host", "device"):
        values = [float(getattr(reading, name)) for reading in readings]
        found = trend(values, kernels)
        report.add(
            f"memory_{name}", first_mib=values[0], last_mib=values[-1], growth_mib=found.growth,
            error_mib=found.error, limit_mib=LIMIT_MIB,
            graphs_mib=found.kernel * kernels[-1], kernel_kib=found.kernel * 1024,
            verdict="flat" if found.flat else "not flat",
        )  # fmt: skip
        right &= found.flat
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=10, help="behind which memory is read")
    parser.add_argument("--seconds", type=float, default=3, help="of a cycle")
    parser.add_argument("--warm-up", type=int, default=2, help="cycles before those")
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
