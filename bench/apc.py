"""What the prefix cache is worth: time to first token of the requests that agents send.

    python -m bench.apc [--tokens 16384] [--repeat 3] [--cases append_200,...] [--save] [-- FLAGS]

Two servers of ksl-nano on the CPU take turns, one with the prefix cache and one without; FLAGS go
to both. `ratio` is off over on, the median of all repeats: how many times sooner the answer begins
(of a fan-out: how many times sooner all six have their answer; of decode: how the speed on adopted
state compares). Every repeat has conversations of its own. The server with the cache is asked
first, but which one is alternates for an edit. Of appended turns it answers one before the other
server does and another like it after that, and `on` is the mean: what slows the machine for a
second or two would else slow the long answer and miss the short one.
`cpu_ratio` is the same of the server's processor time for the whole answer, which a busy machine
disturbs less.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bench.report import ROOT, Report
from kslserve.ksl.open import bundled_path, open_model
from kslserve.text.tokenizer import Tokenizer

WORDS = (
    *("river", "stone", "copper", "window", "garden", "lantern", "market", "silver", "bridge"),
    *("engine", "kernel", "socket", "buffer", "thread", "parse", "token", "module", "import"),
    *("return", "value", "error", "string", "index"),
)
FAN_OUT = 6
QUESTION_TOKENS = 50
DECODE_TOKENS = 128
TARGETS = {"append_200": 30, "append_2000": 6, "resend": 75, "restart": 15, "fan_out_cold": 4.5,
           "fan_out_warm": 4.5}  # fmt: skip
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds to wait with and without the cache, the server's processor seconds, more figures."""

    on: float
    off: float
    on_cpu: float
    off_cpu: float
    more: dict[str, int]


class Server:
    """`python -m kslserve` with flags, on a port of its own."""

    def __init__(self, *flags: str) -> None:
        command = [
            sys.executable,
            "-m",
            "kslserve",
            "--port",
            "0",
            "--log-level",
            "warning",
            *flags,
        ]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ready"):
                self.port = int(line.split("//127.0.0.1:")[1].split("/")[0])
                return
        raise SystemExit(f"the server did not start: {' '.join(command)}")

    def cpu_s(self) -> float:
        """Processor time of all its threads so far."""
        total = 0
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError):  # it ended
                total += int(task.read_text().split()[0])
        return total / 1e9

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()


@dataclass(slots=True)
class Answer:
    """first_s: from sending to the first sign of output; last_s: to the end. cpu_s: processor time
    of the server meanwhile."""

    first_s: float = 0.0
    last_s: float = 0.0
    cpu_s: float = 0.0
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def decode_s(self) -> float:
        """Seconds per token after the first."""
        return (self.last_s - self.first_s) / (int(self.usage["completion_tokens"]) - 1)


def ask(server: Server, messages: list[Message], new_tokens: int = 2, **more: Any) -> Answer:
    body = {
        "model": "ksl-nano",
        "messages": messages,
        "max_tokens": new_tokens,
        "temperature": 0,
        "enable_thinking": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    answer = Answer()
    cpu, begun = server.cpu_s(), time.perf_counter()
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read().decode()}")
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            answer.text += text
            if not answer.first_s and (text or choice["finish_reason"]):
                answer.first_s = time.perf_counter() - begun
    answer.last_s = time.perf_counter() - begun
    answer.cpu_s = server.cpu_s() - cpu
    connection.close()
    return answer


class Texts:
    """Filler of a known number of tokens, different on every call and the same in every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        with open_model(str(bundled_path())) as file:
            assert file.tokenizer_json is not None
            self._tokenizer = Tokenizer(file.tokenizer_json)

    def make(self, tokens: int) -> str:
        words = self._random.choices(WORDS, k=tokens)
        while (count := len(self._tokenizer.encode(" ".join(words)))) > tokens:
            del words[: max(1, (count - tokens) * len(words) // (2 * count))]
        return " ".join(words)

    def conversation(self, tokens: int) -> list[Message]:
        """A system message of nearly `tokens` tokens, as coding clients send, and a question."""
        return [
            {"role": "system", "content": self.make(tokens - QUESTION_TOKENS)},
            {"role": "user", "content": self.make(QUESTION_TOKENS)},
        ]

    def follow(self, messages: list[Message], answer: Answer, tokens: int) -> list[Message]:
        return [
            *messages,
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": self.make(tokens)},
        ]


class Round:
    """Every case once, on conversations of its own. A method per case; most of them go on from one
    conversation that the server with the cache has answered once, to save time."""

    def __init__(
        self, on: Server, off: Server, texts: Texts, tokens: int, flags: list[str], off_first: bool
    ) -> None:
        self.on, self.off = on, off
        self.off_first = off_first
        self.texts = texts
        self.tokens = tokens
        self.flags = flags

    @cached_property
    def begun(self) -> tuple[list[Message], Answer]:
        """A conversation, and what the server with the cache answered."""
        messages = self.texts.conversation(self.tokens)
        return messages, ask(self.on, messages, 16)

    @cached_property
    def without(self) -> Answer:
        """The answer of the other server."""
        return ask(self.off, self.begun[0], 16)

    def cold(self) -> Result:
        return self._result(self.begun[1], self.without)

    def resend(self) -> Result:
        messages, _ = self.begun
        return self._result(ask(self.on, messages), self.without)

    def append_200(self) -> Result:
        return self._append(200)

    def append_2000(self) -> Result:
        return self._append(2000)

    def _append(self, tokens: int) -> Result:
        """Two turns that follow on the same one, and the first of them without the cache."""
        messages = self.texts.follow(*self.begun, tokens)
        before, off = ask(self.on, messages), ask(self.off, messages)
        after = ask(self.on, self.texts.follow(*self.begun, tokens))
        return Result(
            (before.first_s + after.first_s) / 2,
            off.first_s,
            (before.cpu_s + after.cpu_s) / 2,
            off.cpu_s,
            {
                "prompt": int(off.usage["prompt_tokens"]),
                "cached": min(before.cached, after.cached),
            },
        )

    def decode(self) -> Result:
        """Seconds per token on adopted state, and on state that was computed whole."""
        messages, _ = self.begun
        on = ask(self.on, messages, DECODE_TOKENS, ignore_eos=True)
        off = ask(self.off, messages, DECODE_TOKENS, ignore_eos=True)
        return Result(on.decode_s, off.decode_s, on.cpu_s, off.cpu_s, {"cached": on.cached})

    def edit(self) -> Result:
        """Eight turns; the third question is asked anew, with all that followed it."""
        messages = self.texts.conversation(self.tokens // 8)
        for _ in range(7):
            messages = self.texts.follow(messages, ask(self.on, messages, 16), self.tokens // 8)
        edited = [dict(message) for message in messages]
        edited[5]["content"] = self.texts.make(self.tokens // 8)
        return self._both(edited)

    def fan_out_cold(self) -> Result:
        return self._fan_out(self.texts.conversation(self.tokens)[0])

    def fan_out_warm(self) -> Result:
        messages, _ = self.begun
        return self._fan_out(messages[0])

    def restart(self) -> Result:
        """The next turn after the server was stopped and started again."""
        with tempfile.TemporaryDirectory() as folder:
            flags = [*self.flags, "--prefix-cache-dir", folder]
            server = Server(*flags)
            messages = self.texts.conversation(self.tokens)
            following = self.texts.follow(messages, ask(server, messages, 16), 200)
            server.stop()
            server = Server(*flags)
            on = ask(server, following)
            server.stop()
        return self._result(on, ask(self.off, following))

    def _fan_out(self, system: Message) -> Result:
        """Six requests at once: one long system text, six questions."""
        requests = [
            [system, {"role": "user", "content": self.texts.make(QUESTION_TOKENS)}]
            for _ in range(FAN_OUT)
        ]
        walls, cpus, cached = [], [], []
        for server in (self.on, self.off):
            cpu, begun = server.cpu_s(), time.perf_counter()
            with ThreadPoolExecutor(FAN_OUT) as pool:
                answers = list(pool.map(partial(ask, server), requests))
            walls.append(time.perf_counter() - begun)
            cpus.append(server.cpu_s() - cpu)
            cached.append(sum(answer.cached for answer in answers))
        return Result(walls[0], walls[1], cpus[0], cpus[1], {"cached": cached[0]})

    def _both(self, messages: list[Message]) -> Result:
        if self.off_first:
            off = ask(self.off, messages)
            return self._result(ask(self.on, messages), off)
        return self._result(ask(self.on, messages), ask(self.off, messages))

    @staticmethod
    def _result(on: Answer, off: Answer) -> Result:
        prompt = int(on.usage["prompt_tokens"])
        more = {"prompt": prompt, "cached": on.cached}
        return Result(on.first_s, off.first_s, on.cpu_s, off.cpu_s, more)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [
        "cold", "append_200", "append_2000", "resend", "edit", "fan_out_cold", "fan_out_warm",
        "decode", "restart",
    ]  # fmt: skip
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--cases", default=",".join(names), help="comma-separated names")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags for both servers, after --")
    args = parser.parse_args()
    window = args.tokens + 4096
    flags = [
        "--context", str(window), "--kv-tokens", str(2 * FAN_OUT * window),
        "--max-seqs", str(FAN_OUT), *args.flags,
    ]  # fmt: skip
    report = Report("apc")
    on, off = Server(*flags), Server(*flags, "--no-prefix-cache")
    try:
        texts = Texts(seed=1)
        rounds = [
            Round(on, off, texts, args.tokens, flags, off_first=i % 2 == 1)
            for i in range(args.repeat)
        ]
        for name in args.cases.split(","):
            add(report, name, [getattr(each, name)() for each in rounds])
    finally:
        on.stop()
        off.stop()
    report.write(args.save)


def add(report: Report, name: str, runs: list[Result]) -> None:
    on, off = (statistics.median(times) for times in ([r.on for r in runs], [r.off for r in runs]))
    # Of each repeat by itself: what slows the machine for a while slows both.
    cpu_ratio = statistics.median(run.off_cpu / run.on_cpu for run in runs)
    ratio = statistics.median(run.off / run.on for run in runs)
    target = {"target": TARGETS[name]} if name in TARGETS else {}
    report.add(
        name, on_ms=on * 1e3, off_ms=off * 1e3, **runs[-1].more, cpu_ratio=cpu_ratio,
        ratio=ratio, **target, of="prefix cache off",
    )  # fmt: skip


if __name__ == "__main__":
    main()
