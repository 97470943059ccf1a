"""Server-sent events per second of each streaming dialect, by one server process on one core.

    python -m bench.sse [--streams 1,64] [--tokens 2000] [--repeat 3] [--save]

Starts `python -m kslserve --engine fake`, whose tokens cost nothing, and reads N streams at once.
`events_cpu_s`: events over the server's processor time, which is the rate that one core can reach;
`events_wall_s`: over the wall time, in which the clients run too. `ratio`: processor time per event
over that of a server that only writes frames, in the same run. Medians of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from statistics import median
from typing import Any

from bench.python_overhead import cpu_seconds, measure, start
from bench.report import Report
from kslserve.app import new_loop

HEAD = (
    b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n"
)


def bodies(tokens: int) -> dict[str, tuple[bytes, dict[str, Any]]]:
    """By dialect: path and a request for so many tokens of visible text."""
    common = {"model": "fake", "stream": True, "ignore_eos": True, "enable_thinking": False}
    said = [{"role": "user", "content": "Say something."}]
    return {
        "chat": (b"/v1/chat/completions", {**common, "max_tokens": tokens, "messages": said}),
        "completions": (b"/v1/completions", {**common, "max_tokens": tokens, "prompt": "x"}),
        "messages": (
            b"/v1/messages",
            {**common, "max_tokens": tokens, "messages": said, "thinking": {"type": "disabled"}},
        ),
        "responses": (b"/v1/responses", {**common, "max_output_tokens": tokens, "input": said}),
    }


async def count_events(port: int, path: bytes, body: bytes) -> int:
    """Events of one stream, read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % (path, len(body)) + body)
    events, last = 0, b""
    while data := await reader.read(1 << 16):
        events += (last + data).count(b"\n\n")
        last = data[-1:] if not data.endswith(b"\n\n") else b""
    writer.close()
    return events


def run(
    command: list[str], streams: int, path: bytes, body: bytes, tokens: int
) -> tuple[float, float, float]:
    """(events, processor seconds, wall seconds) of so many streams at once."""
    process, port = start(command)

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(count_events(port, path, body) for _ in range(streams)))

    try:
        used, begun = cpu_seconds(process.pid), time.perf_counter()
        with asyncio.Runner(loop_factory=new_loop) as runner:
            found = runner.run(all_of_them())
        wall, used = time.perf_counter() - begun, cpu_seconds(process.pid) - used
    finally:
        process.terminate()
        process.communicate()
    if min(found) < tokens // 2:
        raise SystemExit(f"a stream of {tokens} tokens had only {min(found)} events")
    return sum(found), used, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,64")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    report = Report("sse")
    for streams in (int(n) for n in args.streams.split(",")):
        tokens = max(args.tokens // streams, 100)
        server = [
            sys.executable, "-m", "kslserve", "--engine", "fake", "--port", "0",
            "--max-seqs", str(max(8, streams)), "--log-level", "warning",
        ]  # fmt: skip
        bare = [
            sys.executable, "-m", "bench.python_overhead", "--baseline", str(streams),
            "--tokens", str(tokens),
        ]  # fmt: skip
        base = median(measure(bare, streams, b"{}", tokens) for _ in range(args.repeat))
        for name, (path, request) in bodies(tokens).items():
            body = json.dumps(request).encode()
            runs = [run(server, streams, path, body, tokens) for _ in range(args.repeat)]
            each = median(used / events for events, used, _ in runs)
            report.add(
                f"{name}_{streams}",
                events_cpu_s=1 / each,
                events_wall_s=median(events / wall for events, _, wall in runs),
                us_event=each * 1e6,
                ratio=each * 1e6 / base,
                of="bare socket writes",
            )
    report.write(args.save)


if __name__ == "__main__":
    main()
