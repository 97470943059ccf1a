"""A full-size model behind the whole stack: first tokens cold and warm, decode beside a long
prompt and beside copies between tiers. `bench.churn` is the traffic of many clients.

    python -m bench.at_size [--cases left,first,mixed,donor,tiers] [--tokens 8192,32768,131072]
                            [--save] [-- FLAGS]

FLAGS go to the server; by default it serves `synth:27b` in NVFP4 on the CUDA device. `left`: a
client that hangs up in the middle of a prompt of the longest size: how long until its memory is
free again, how soon a short prompt that comes then begins, and what is left of the work when as
much of the text comes back as was computed. `first`: a prompt nobody has seen, then the next turn
of that conversation with 200 new tokens; `ratio` is how many times sooner the second begins.
`mixed`: gaps between tokens of four streams, before and while a prompt of the longest size is
computed, beside the bound that is configured. `donor`: a prompt of the size before the longest and,
while it is computed, three others that go on from the same text: they wait for it, and `ratio` is
how many times sooner all of them have begun than one by one without it. `tiers`, on a server of its
own with few slabs for checkpoints: gaps of a decoding stream alone, while the checkpoints of such a
prompt are copied to host memory and disk, and while they come back. Cases run in the order in which
they are named, and each prints its rows when it ends.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from bench.apc import Message, Server, Texts, ask
from bench.report import Report
from kslserve.config import Settings

DEFAULT_FLAGS = ("--model", "synth:27b", "--weights", "nvfp4", "--device", "cuda")
STREAMS = 4
ALONE_S = 1.5
NEW_TOKENS = 200
TARGET = 50  # warm over cold, at 32k
WAITING, AFTER_S = 3, 0.05  # prompts that wait for another, and how much later they come
LEFT_PART = 3  # a client hangs up when so large a part of its prompt, one in LEFT_PART, is computed
MOVE_S = 20  # longest wait for copies
BOUNDS_MS = (0, 2, 5, 10, 15, 20, 30, 50, 100, 200, 500, 1000, float("inf"))


def gaps_of(server: Server, messages: list[Message], tokens: int, stop: threading.Event) -> list[
    tuple[float, float]
]:  # fmt: skip
    """(when, seconds since the one before) of every chunk after the first, until `stop`."""
    body = {
        "model": "m", "messages": messages, "max_tokens": tokens, "temperature": 1, "stream": True,
        "ignore_eos": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    found: list[tuple[float, float]] = []
    last = 0.0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        now = time.perf_counter()
        if last:
            found.append((now, now - last))
        last = now
        if stop.is_set():
            break
    connection.close()
    return found


def health(server: Server) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/healthz")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def first(report: Report, server: Server, texts: Texts, sizes: list[int]) -> None:
    for tokens in sizes:
        messages = texts.conversation(tokens)
        cold = ask(server, messages, 16)
        warm = ask(server, texts.follow(messages, cold, NEW_TOKENS))
        ratio = cold.first_s / warm.first_s
        prompt = int(cold.usage["prompt_tokens"])
        report.add(
            f"first_{tokens}", cold_ms=cold.first_s * 1e3, warm_ms=warm.first_s * 1e3,
            prompt_tok_s=prompt / cold.first_s, cached=warm.cached, ratio=ratio, target=TARGET,
            of="the same server, cold",
        )  # fmt: skip


def mixed(report: Report, server: Server, texts: Texts, sizes: list[int]) -> None:
    stop, bound = threading.Event(), Settings().decode_gap_ms
    with ThreadPoolExecutor(STREAMS) as pool:
        jobs = [
            pool.submit(gaps_of, server, texts.conversation(500), 20000, stop)
            for _ in range(STREAMS)
        ]
        time.sleep(ALONE_S)
        begun = time.perf_counter()
        answer = ask(server, texts.conversation(sizes[-1]))
        ended = begun + answer.first_s
        stop.set()
        gaps = [gap for job in jobs for gap in job.result()]
    for name, part in (
        ("alone", [gap for at, gap in gaps if begun - ALONE_S / 2 < at < begun]),
        ("beside_prompt", [gap for at, gap in gaps if begun < at < ended]),
    ):
        if len(part) < 2:
            continue
        ranks = statistics.quantiles(part, n=100, method="inclusive")
        report.add(
            f"mixed_{name}", gaps=len(part), p50_ms=ranks[49] * 1e3, p99_ms=ranks[98] * 1e3,
            most_ms=max(part) * 1e3, ratio=max(part) * 1e3 / bound,
            of="the default --decode-gap-ms",
        )  # fmt: skip
    report.add("mixed_prompt", tokens=sizes[-1], first_ms=answer.first_s * 1e3)


def donor(report: Report, server: Server, texts: Texts, sizes: list[int]) -> None:
    tokens = sizes[-2:][0]
    shared = texts.conversation(tokens)
    others = [[shared[0], *texts.conversation(500)[1:]] for _ in range(WAITING)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(1 + WAITING) as pool:
        job = pool.submit(ask, server, shared)
        time.sleep(AFTER_S)
        later = [pool.submit(ask, server, messages) for messages in others]
        cold, answers = job.result(), [one.result() for one in later]
        took = time.perf_counter() - begun
    report.add(
        "donor", tokens=tokens, first_ms=cold.first_s * 1e3,
        waited_ms=statistics.median(one.first_s for one in answers) * 1e3,
        least_cached=min(one.cached for one in answers),
        ratio=(1 + WAITING) * cold.first_s / took, of="one by one, cold",
    )  # fmt: skip


def left(report: Report, server: Server, texts: Texts, sizes: list[int]) -> None:
    part = sizes[-1] // LEFT_PART
    again, short = texts.conversation(part), texts.conversation(500)
    system = {"role": "system", "content": f"{again[0]['content']} {texts.make(sizes[-1] - part)}"}
    before = health(server)["scheduler"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"model": "m", "messages": [system, again[1]], "max_tokens": 2, "stream": True}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    done = int(before["prompt_tokens"])
    while int(health(server)["scheduler"]["prompt_tokens"]) < done + part:
        time.sleep(0.002)
    connection.sock.close()
    begun = time.perf_counter()
    while (after := health(server)["scheduler"])["running"]:
        time.sleep(0.002)
    freed = time.perf_counter() - begun
    soon = ask(server, short)
    back = ask(server, again)
    report.add(
        "left", tokens=sizes[-1], computed=int(after["prompt_tokens"]) - done,
        freed_ms=freed * 1e3, next_ms=soon.first_s * 1e3, again_tokens=part,
        again_ms=back.first_s * 1e3, again_cached=back.cached,
        **{f"{name}_change": after[name] - before[name] for name in ("slots_free", "blocks_free")},
    )  # fmt: skip


def histogram(gaps: list[float]) -> str:
    """Counts of gaps up to each bound, in milliseconds."""
    counts = [sum(low < gap * 1e3 <= high for gap in gaps) for low, high in pairwise(BOUNDS_MS)]
    parts = [f"<={high:g}:{n}" for n, high in zip(counts, BOUNDS_MS[1:], strict=True) if n]
    return " ".join(parts)


def moved(server: Server) -> int:
    """Bytes of checkpoints below the device so far."""
    cache = health(server)["scheduler"]["cache"]
    return int(cache["host_bytes"]) + int(cache["disk_bytes"])


def tiers(report: Report, texts: Texts, tokens: int, flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            *flags, "--context", str(tokens + 4096), "--max-seqs", "4",
            "--kv-tokens", str(3 * (tokens + 4096)), "--prefix-cache-slabs", "2",
            "--prefix-cache-host-bytes", "16GiB", "--prefix-cache-dir", folder,
        )  # fmt: skip
        stop = threading.Event()
        try:
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(gaps_of, server, texts.conversation(500), 20000, stop)
                time.sleep(ALONE_S)
                spans = {"alone": (time.perf_counter() - ALONE_S / 2, time.perf_counter())}
                first = texts.conversation(tokens)
                answer = ask(server, first)
                begun, before = time.perf_counter(), moved(server)
                while time.perf_counter() < begun + MOVE_S:
                    time.sleep(0.05)
                    if (now := moved(server)) == before and time.perf_counter() > begun + 1:
                        break
                    before = now
                spans["copied_down"] = (begun, time.perf_counter())
                down = before
                ask(server, texts.conversation(tokens))  # takes the slabs of the first one
                begun = time.perf_counter()
                warm = ask(server, texts.follow(first, answer, NEW_TOKENS))
                spans["copied_up"] = (begun, begun + warm.first_s)
                stop.set()
                gaps = job.result()
        finally:
            stop.set()
            server.stop()
    for name, (begin, end) in spans.items():
        part = [gap for at, gap in gaps if begin < at < end]
        if len(part) < 2:
            continue
        ranks = statistics.quantiles(part, n=100, method="inclusive")
        report.add(
            f"tiers_{name}", gaps=len(part), p50_ms=ranks[49] * 1e3, p99_ms=ranks[98] * 1e3,
            most_ms=max(part) * 1e3, histogram=histogram(part),
        )  # fmt: skip
    report.add(
        "tiers_prompt", tokens=tokens, cold_ms=answer.first_s * 1e3, warm_ms=warm.first_s * 1e3,
        cached=warm.cached, moved_mib=down / 2**20,
    )  # fmt: skip


CASES = {"left": left, "first": first, "mixed": mixed, "donor": donor}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="left,first,mixed,donor,tiers")
    parser.add_argument("--tokens", default="8192,32768,131072")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    sizes = sorted(map(int, args.tokens.split(",")))
    window = sizes[-1] + 4096
    report = Report("at_size")
    texts = Texts(seed=5)
    flags = args.flags or DEFAULT_FLAGS
    server: Server | None = None
    try:
        for case in args.cases.split(","):
            if case == "tiers":
                if server is not None:
                    server.stop()
                    server = None
                tiers(report, texts, sizes[-2:][0], flags)
                continue
            if server is None:
                server = Server(
                    *flags, "--context", str(window), "--kv-tokens", str(8 * window),
                    "--max-seqs", "16",
                )  # fmt: skip
            CASES[case](report, server, texts, sizes)
    finally:
        if server is not None:
            server.stop()
    report.write(args.save)


if __name__ == "__main__":
    main()
