"""Jobs with `score`: the log-probability of every prompt token, once, whatever the chunks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.fakemodel import HashModel, Timeline
from kslserve.engine.types import RowKind
from kslserve.sched.cache.saves import CachePolicy
from kslserve.sched.job import Job
from kslserve.sched.sequence import Sequence
from tests.world import SIZES, World, job

TOP = 2
SAMPLING = SamplingParams(logprobs=TOP)


class Scores:
    """A sink that keeps scores and output apart."""

    def __init__(self) -> None:
        self.scores: list[list[tuple[int, float]]] = []
        self.pieces: list[int] = []
        self.ids: list[int] = []
        self.cached = -1
        self.reason: FinishReason | None = None

    def admitted(self, cached_tokens: int) -> None:
        self.cached = cached_tokens

    def tokens(self, ids: list[int], logprobs: list[list[tuple[int, float]]] | None) -> None:
        assert logprobs is not None
        if ids:
            assert len(logprobs) == len(ids)
            self.ids += ids
        else:
            assert not self.ids, "scores after output"
            self.scores += logprobs
            self.pieces.append(len(logprobs))

    def ended(self, reason: FinishReason, error: object) -> None:
        assert error is None
        self.reason = reason


def truth(new: Job) -> list[list[tuple[int, float]]]:
    model = HashModel(512)
    timeline = Timeline()
    found = []
    for token, following in zip(new.prompt_ids[:-1], new.prompt_ids[1:], strict=True):
        timeline.append(int(token))
        found.append(model.top(timeline, int(following), TOP))
    return found


def run(world: World, *jobs: Job) -> list[Scores]:
    sinks = [Scores() for _ in jobs]
    for new, sink in zip(jobs, sinks, strict=True):
        world.scheduler.submit(new, sink)
    world.run()
    assert all(sink.reason is FinishReason.LENGTH for sink in sinks)
    return sinks


@pytest.mark.parametrize("prompt", [1, 2, 3, 48, 49, 50, 100])
def test_every_position_once(prompt: int) -> None:
    new = job(prompt, 2, sampling=SAMPLING, score=True)
    (sink,) = run(World(), new)
    assert [[token for token, _ in entry] for entry in sink.scores] == [
        [token for token, _ in entry] for entry in truth(new)
    ]
    assert sink.scores == truth(new)
    assert len(sink.ids) == 2
    plain = job(prompt, 2, sampling=SAMPLING)
    assert run(World(), plain)[0].ids == sink.ids


def test_beside_others_and_from_no_checkpoint() -> None:
    policy = CachePolicy(min_tokens=4, gap=4, interval=32)
    sizes = dataclasses.replace(SIZES, slabs=16, blocks=120)
    world = World(sizes, {"wave_columns": 24, "cache": policy})
    new = job(90, 1, sampling=SAMPLING, score=True)
    first = run(world, dataclasses.replace(new, score=False, sampling=SAMPLING))
    assert first[0].scores == []
    again = run(world, dataclasses.replace(new, score=False))
    assert again[0].cached > 0
    together = run(world, new, job(40, 3, seed=2, sampling=SAMPLING), new)
    for sink in (together[0], together[2]):
        assert sink.cached == 0
        assert sink.scores == truth(new)
        assert len(sink.pieces) > 1


def test_rows() -> None:
    """Scored positions, the last one, and positions that are computed again share no row."""
    new = job(10, 4, sampling=SAMPLING, score=True)
    sequence = Sequence(1, new, Scores(), 0.0)
    assert sequence.row_limit(4) == 4
    sequence.aim_prompt(4)
    assert (sequence.row.kind, sequence.row.n, len(sequence.row.tokens)) == (RowKind.SCORE, 4, 5)
    assert sequence.row.top_n == TOP
    sequence.computed = sequence.scored = 4
    assert sequence.row_limit(6) == 5
    sequence.aim_prompt(5)
    assert np.array_equal(sequence.row.tokens, new.prompt_ids[4:10])
    # As if it had to give its memory away and start over.
    sequence.computed = 0
    assert sequence.row_limit(10) == 4
    sequence.aim_prompt(4)
    assert (sequence.row.kind, len(sequence.row.tokens), sequence.row.top_n) == (
        RowKind.PREFILL, 4, None,
    )  # fmt: skip
    sequence.computed = sequence.scored = 9
    assert sequence.row_limit(1) == 1
    sequence.aim_prompt(1)
    assert (sequence.row.kind, sequence.row.top_n) == (RowKind.LAST, TOP)
    plain = Sequence(2, job(10, 4), Scores(), 0.0)
    assert plain.row_limit(10) == 10
