"""Host CPU time per streamed token: the whole server path with an engine that costs nothing.

    python -m bench.python_overhead [--streams 1,8,32] [--tokens 4000] [--repeat 3] [--save]
        [-- FLAGS OF THE SERVER]

Starts `python -m kslserve --engine fake`, streams to N clients at once and divides the server
process's CPU time by the tokens. The baseline of the same run is a server with the same loop that
only writes a frame of the same size to every client once per wave; `ratio` is server over baseline.
Medians of the repeats. What the fake engine takes itself is part of it, in place of what packing
and reading the native engine's structs takes; `structs_us` is the latter, by itself, for a row of
waves that decode on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import cast

from _kslserve import ffi, lib

from bench.report import ROOT, Report
from kslserve.app import new_loop
from kslserve.engine.marshal import Pending, WavePacker
from kslserve.engine.records import DoneReader
from kslserve.engine.types import Row, RowKind, Wave

FRAME_BYTES = 244  # of one content chunk in its chunked framing
REQUEST_HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, threads that ended not included."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


class Baseline(asyncio.Protocol):
    """Per connection: a frame per loop turn of all clients, as one wave would write them."""

    def __init__(self, clients: list[Baseline], want: list[int], tokens: int) -> None:
        self.clients, self.want, self.tokens = clients, want, tokens

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.clients.append(self)
        if len(self.clients) == self.want[0]:
            asyncio.get_running_loop().call_soon(self.wave, self.tokens)

    def wave(self, left: int) -> None:
        frame = b"x" * FRAME_BYTES
        for client in self.clients:
            client.transport.write(frame if left else b"data: [DONE]\n\n")
        if left:
            asyncio.get_running_loop().call_soon(self.wave, left - 1)
        else:
            self.clients.clear()


async def serve_baseline(streams: int, tokens: int) -> None:
    clients: list[Baseline] = []
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Baseline(clients, [streams], tokens), "127.0.0.1", 0)
    print("ready", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", flush=True)
    await server.serve_forever()


async def client(port: int, body: bytes, tokens: int) -> None:
    """Read one stream; it has to be of so many tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST_HEAD % len(body) + body)
    tail = b""
    while b"[DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"the server closed early: {tail[-300:]!r}")
        tail = tail[-2000:] + data
    if b'"usage"' in tail and b'"completion_tokens":%d,' % tokens not in tail:
        raise SystemExit(f"the answer is shorter than {tokens} tokens")
    writer.close()


def start(command: list[str]) -> tuple[subprocess.Popen[str], int]:
    """Start a server and read its port from the line that says it is ready."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            return process, int(line.split("//127.0.0.1:")[1].split("/")[0])
    raise SystemExit("the server did not start")


def measure(command: list[str], streams: int, body: bytes, tokens: int) -> float:
    """CPU microseconds of the server process per token."""
    process, port = start(command)

    async def run() -> None:
        await asyncio.gather(*(client(port, body, tokens) for _ in range(streams)))

    try:
        before = cpu_seconds(process.pid)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(run())
        return (cpu_seconds(process.pid) - before) / (streams * tokens) * 1e6
    finally:
        process.terminate()
        process.communicate()


def structs_us(rows: int, repeat: int = 5, waves: int = 2000) -> float:
    """Microseconds that the bridge to the native engine takes for one row of a wave."""
    packer = WavePacker(ffi, vocab=8192, tap_width=1, rows=rows, columns=rows)
    wave = Wave(1, [Row(RowKind.LAST, i, i, 9, 1, [5]) for i in range(rows)])
    packer.pack(wave)
    wave.same_rows = True
    reader, pending = DoneReader(lib, rows + 1), Pending()
    records = ffi.from_buffer("ksl_done[]", reader.memory)
    for i in range(rows):
        records[i].n_tokens = 1
    records[rows].flags = lib.KSL_DONE_WAVE_END

    def once() -> float:
        begun = time.perf_counter()
        for _ in range(waves):
            packer.pack(wave)
            reader.read(rows + 1, {0: pending})
        return (time.perf_counter() - begun) / (waves * rows) * 1e6

    return median(once() for _ in range(repeat))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    parser.add_argument("--baseline", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.baseline:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve_baseline(args.baseline, args.tokens))
    report = Report("python_overhead")
    for streams in (int(s) for s in args.streams.split(",")):
        tokens = args.tokens
        body = json.dumps(
            {
                "model": "fake",
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": tokens,
                "ignore_eos": True,
                "enable_thinking": False,
                "messages": [{"role": "user", "content": "Say something."}],
            }
        ).encode()
        server = [
            sys.executable, "-m", "kslserve", "--engine", "fake", "--port", "0",
            "--max-seqs", str(max(8, streams)), "--log-level", "warning", *args.flags,
        ]  # fmt: skip
        bare = [
            sys.executable, "-m", "bench.python_overhead", "--baseline", str(streams),
            "--tokens", str(tokens),
        ]  # fmt: skip
        runs = [
            (measure(server, streams, body, tokens), measure(bare, streams, body, tokens))
            for _ in range(args.repeat)
        ]
        own, base = median(run[0] for run in runs), median(run[1] for run in runs)
        report.add(
            f"streams_{streams}", us_per_token=own, baseline_us=base, ratio=own / base,
            of="bare socket writes", structs_us=structs_us(streams),
        )  # fmt: skip
    report.write(args.save)


if __name__ == "__main__":
    main()
