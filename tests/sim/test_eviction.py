"""Eviction by value against least recently used, on the requests of real coding agents.

`tests/data/agent_trace.json` holds what each captured client sent: prompts and answers as pieces
that they share, boundaries, order (`make_agent_trace.py` says how it came about). Here each file is
played in several projects at once: the system block is the same in all of them, what follows it is
each project's own. There are fewer slabs than conversations. Lengths are scaled down, for speed."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.cache.value import Score, recency, value
from kslserve.sched.scheduler import Job
from tests.world import SIZES, Recorder, World

TRACE = Path(__file__).resolve().parents[1] / "data" / "agent_trace.json"
SCALE = 16
PROJECTS = 3
SPAN_S = 120.0  # in which the sessions start
THINK_S = 2.0  # mean time that a client takes for its tools
POOLS = replace(SIZES, slabs=4 + 14, blocks=1200, blocks_per_slot=256)


class Session:
    """One file in one project: its requests, each after the answer to the one before."""

    def __init__(self, play: Play, project: int, requests: list[dict[str, Any]]) -> None:
        self.play = play
        self.project = project
        self.requests = requests
        # Of its own: what it does must not depend on who else is fast.
        self.rng = random.Random(f"{play.seed} {project} {requests[0]['file']}")
        self.next = 0
        play.world.clock.call_later(self.rng.uniform(0.0, SPAN_S), self.send)

    def send(self) -> None:
        request = self.requests[self.next]
        self.next += 1
        shared = request["boundaries"][0] if request["boundaries"] else 0
        parts = [
            self.play.text(piece, None if at < shared else self.project)
            for at, piece in enumerate(request["prompt"])
        ]
        answer = np.concatenate([self.play.text(p, self.project) for p in request["answer"]])
        ends = np.cumsum([len(part) for part in parts])
        boundaries = tuple(int(ends[n - 1]) for n in request["boundaries"])
        ids = np.concatenate(parts)
        self.play.prompt_tokens += len(ids)
        sampling = SamplingParams(temperature=1.0)
        job = Job(ids, len(answer), sampling, 0, boundaries=boundaries, forced=answer)
        self.play.world.submit(job, self.heard)

    def heard(self, event: str, recorder: Recorder) -> None:
        if event == "ended" and self.next < len(self.requests):
            delay = self.rng.expovariate(1.0 / THINK_S)
            self.play.world.clock.call_later(delay, self.send)


class Play:
    """All sessions under one policy, to the end."""

    def __init__(self, seed: int, score: Score) -> None:
        self.seed = seed
        self.prompt_tokens = 0
        self._texts: dict[tuple[int, int | None], np.ndarray[Any, Any]] = {}
        trace = json.loads(TRACE.read_text())
        self._lengths = [-(-n // SCALE) for n in trace["pieces"]]
        files: dict[str, list[dict[str, Any]]] = {}
        for request in trace["requests"]:
            files.setdefault(request["file"], []).append(request)
        self.world = World(
            POOLS,
            limits={"cache": CachePolicy(interval=256), "context": 4096, "max_queue": 1000},
            options={"strict": False, "wave_s": 0.001, "column_s": 0.0001},
        )
        self.world.scheduler.cache.device.score = score
        for project in range(PROJECTS):
            for requests in files.values():
                Session(self, project, requests)
        while self.world.clock.step():
            pass
        self.world.check_all_free()

    def text(self, piece: int, project: int | None) -> np.ndarray[Any, Any]:
        """The ids of a piece: the same ones in every project, or its own."""
        ids = self._texts.get((piece, project))
        if ids is None:
            own = 0 if project is None else project + 1
            rng = np.random.default_rng((piece, own))
            ids = rng.integers(4, 512, self._lengths[piece], dtype=np.int32)
            self._texts[piece, project] = ids
        return ids

    @property
    def saved(self) -> float:
        """Part of all prompt tokens that was not computed."""
        return self.world.scheduler.cache.tokens_saved / self.prompt_tokens


@pytest.mark.parametrize("seed", range(3))
def test_value_saves_more_than_recency(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    by_value, by_recency = Play(seed, value), Play(seed, recency)
    assert by_value.prompt_tokens == by_recency.prompt_tokens
    with capsys.disabled():
        print(
            f"\ntokens saved: by value {by_value.saved:.1%}, "
            f"least recently used {by_recency.saved:.1%}"
        )
    assert by_value.saved > by_recency.saved
