"""Time to first token and decode rate over HTTP, on the bundled model, beside the engine's own wave
time.

    python -m bench.serving [--prompt 100] [--streams 1,4] [--tokens 200] [--repeat 15] [--save]
        [-- FLAGS OF THE SERVER]

`ratio` of first_token is the wall time over the prompt's prefill time as the engine reports it in
the same run (what the host adds); of decode, tokens per second over the engine's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
import urllib.request
from typing import Any

from bench.python_overhead import REQUEST_HEAD, start
from bench.report import Report
from kslserve.app import new_loop

TEXT = "read the file and tell me what the function returns when the list is empty"


def body(words: int, max_tokens: int, salt: int) -> bytes:
    """A request of about `words` prompt tokens; the salt keeps prompts apart."""
    known = TEXT.split()
    text = " ".join([str(salt), *(known[i % len(known)] for i in range(words))])
    request: dict[str, Any] = {
        "model": "ksl-nano", "stream": True, "max_tokens": max_tokens, "ignore_eos": True,
        "enable_thinking": False, "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": text}],
    }  # fmt: skip
    return json.dumps(request).encode()


async def ask(port: int, data: bytes) -> tuple[float, float, dict[str, int]]:
    """(seconds to the first token, seconds to the end, usage) of one streamed request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(REQUEST_HEAD % len(data) + data)
    received = b""
    first = 0.0
    while b"[DONE]" not in received[-64:]:
        part = await reader.read(1 << 16)
        if not part:
            raise SystemExit(f"the server closed early: {received[-300:]!r}")
        received += part
        if not first and re.search(rb'"content":"[^"]', received):
            first = time.perf_counter() - began
    total = time.perf_counter() - began
    writer.close()
    usage = json.loads(re.findall(rb'"usage":({.*?}})', received)[-1])
    return first, total, usage


def metric(port: int, name: str) -> float:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    return float(re.search(rf"^kslserve_{name} (\S+)$", text, re.M)[1])  # type: ignore[index]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


async def measure(port: int, args: argparse.Namespace, report: Report) -> None:
    words = args.prompt
    _, _, usage = await ask(port, body(words, 2, 0))
    words = max(1, round(words * words / usage["prompt_tokens"]))  # words to the wanted tokens
    firsts, waves = [], []
    for i in range(args.repeat):
        before = metric(port, "wave_seconds_sum")
        first, _, usage = await ask(port, body(words, 1, i + 1))
        firsts.append(first * 1e3)
        waves.append((metric(port, "wave_seconds_sum") - before) * 1e3)
    report.add(
        "first_token", prompt_tokens=usage["prompt_tokens"], ms=median(firsts),
        engine_ms=median(waves), ratio=median(firsts) / median(waves), of="engine prefill time",
    )  # fmt: skip
    for streams in (int(s) for s in args.streams.split(",")):
        before = (metric(port, "wave_seconds_sum"), metric(port, 'tokens_total{kind="generated"}'))
        began = time.perf_counter()
        await asyncio.gather(
            *(ask(port, body(20, args.tokens, 1000 * streams + s)) for s in range(streams))
        )
        wall = time.perf_counter() - began
        engine_s = metric(port, "wave_seconds_sum") - before[0]
        tokens = metric(port, 'tokens_total{kind="generated"}') - before[1]
        report.add(
            "decode_http", streams=streams, tok_s=tokens / wall, engine_tok_s=tokens / engine_s,
            ratio=engine_s / wall, of="engine rate",
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=100)
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    report = Report("serving")
    process, port = start(
        [sys.executable, "-m", "kslserve", "--port", "0", "--log-level", "error", *args.flags]
    )
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(measure(port, args, report))
    finally:
        process.terminate()
        process.communicate()
    report.write(args.save)


if __name__ == "__main__":
    main()
