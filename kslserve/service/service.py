"""Service: what a handler needs to turn a core.Request into a running Generation.

Owns the preparer and the set of live generations; the scheduler owns sequences, app.py owns the
service. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kslserve.core.request import Request, ToolChoice
from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.types import Ids
from kslserve.errors import InvalidRequest, KslError
from kslserve.metrics import Metrics
from kslserve.parse.stream import OutputParser
from kslserve.sched.scheduler import Job, Scheduler, Sequence, Sink
from kslserve.service.constrain import Constraint, call_on
from kslserve.service.generation import Generation, OnEvents
from kslserve.service.grammar import Grammars
from kslserve.service.guides import Guides
from kslserve.service.model import ServedModel
from kslserve.service.prepare import Prepared, Preparer
from kslserve.service.recoveries import Recoveries
from kslserve.service.statistics import statistics_of
from kslserve.text.rendered import Rendered
from kslserve.text.tokenizer import Tokenizer

_SIDE_TOKENS = 2048
_SEED_MASK = (1 << 64) - 1
_SEED_BITS = 53  # survives a client that reads JSON numbers as doubles
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class _Counts:
    """Metrics of generations, looked up once."""

    def __init__(self, metrics: Metrics) -> None:
        self.started = metrics.counter("generations_started_total", "generations submitted")
        self.ended = metrics.labelled(
            "generations_ended_total", "generations by their end", "reason"
        )
        self.live = metrics.gauge("generations_live", "generations submitted and not ended")
        self.queue = metrics.histogram("queue_duration_seconds", "wait for admission", _SECONDS)
        self.first = metrics.histogram(
            "time_to_first_token_seconds", "submit to first token", _SECONDS
        )
        self.total = metrics.histogram("request_duration_seconds", "submit to end", _SECONDS)


def new_seed(seed: int | None) -> int:
    """The seed of a generation: the one asked for, or a random one."""
    return secrets.randbits(_SEED_BITS) if seed is None else seed & _SEED_MASK


def is_aside(prompt: Ids) -> bool:
    """Whether a prompt without tools is one of the small questions that clients ask beside their
    work (a title, a summary, a completion at the cursor), which go first among equals."""
    return len(prompt) < _SIDE_TOKENS


class Tracked(Sink, Protocol):
    """What the service counts: a sink that knows its times and its end. Times are of
    time.monotonic(), None until they happened."""

    @property
    def created_at(self) -> float: ...
    @property
    def admitted_at(self) -> float | None: ...
    @property
    def first_token_at(self) -> float | None: ...
    @property
    def ended_at(self) -> float | None: ...
    @property
    def reason(self) -> FinishReason | None: ...
    @property
    def error(self) -> KslError | None: ...
    def attach(self, cancel: Callable[[KslError | None], None]) -> None: ...
    def cancel(self, error: KslError | None = None) -> None: ...


class Service:
    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        preparer: Preparer,
        scheduler: Scheduler,
        metrics: Metrics,
        *,
        grammars: Grammars | None = None,
        recoveries: Recoveries | None = None,
        recover: bool = True,
        test_hooks: bool = False,
    ) -> None:
        """grammars: as wide as the engine's masks; None makes them at first use. recoveries: None
        counts them and keeps no text. recover: read calls that stray from the format. test_hooks:
        obey Request.force."""
        self.model = model
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.preparer = preparer
        self._guides = Guides(tokenizer, grammars or Grammars(tokenizer, scheduler.vocab))
        self._recoveries = recoveries or Recoveries(metrics)
        self._recover = recover
        self._test_hooks = test_hooks
        self._counts = _Counts(metrics)
        self._live: set[Tracked] = set()

    @property
    def live(self) -> int:
        """Generations that have not ended."""
        return len(self._live)

    async def start(
        self, request: Request, on_events: OnEvents, new_call_id: Callable[[], str]
    ) -> Generation:
        """Prepare and submit. on_events gets every event of the generation, on the loop, after this
        returned. Raises InvalidRequest, ContextLengthExceeded, QueueFull or Unavailable."""
        self.check_sampling(request.sampling)
        prepared = await self.preparer.prepare(request)
        guide = await self._guides.make(request, thinking_open=prepared.thinking_open)
        return self._submit(request, prepared, guide, on_events, new_call_id)

    def cancel_all(self, error: KslError) -> None:
        """End every live generation with an error for its client."""
        for generation in list(self._live):
            generation.cancel(error)

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raise InvalidRequest for token ids that the model does not have."""
        for token, _ in sampling.logit_bias:
            if token >= self.model.vocab:
                raise InvalidRequest(
                    f"logit_bias names token {token}, but the vocabulary has {self.model.vocab}.",
                    param="logit_bias",
                )

    def _submit(
        self,
        request: Request,
        prepared: Prepared,
        guide: Constraint | None,
        on_events: OnEvents,
        new_call_id: Callable[[], str],
    ) -> Generation:
        seed = new_seed(request.sampling.seed)
        tools = request.callable_tools
        # JSON has an end, whatever comes after it is not part of the answer.
        goes_on = request.ignore_eos and request.response_format is None
        stop_ids = () if goes_on else self.model.stop_ids
        job = Job(
            prompt_ids=prepared.ids,
            max_new_tokens=prepared.max_new_tokens,
            sampling=request.sampling,
            seed=seed,
            stop_ids=stop_ids,
            priority=request.priority,
            boundaries=prepared.boundaries,
            forced=self._forced(request),
            guide=guide,
            side=not request.tools and is_aside(prepared.ids),
        )
        parser = OutputParser(
            tools,
            thinking=prepared.thinking_open,
            tools_enabled=bool(tools),
            make_id=new_call_id,
            # An answer in a format may be an object that looks like a call.
            recover=self._recover and request.response_format is None,
            keep_text=self._recoveries.keep_text,
        )

        def ended(generation: Tracked) -> None:
            self._recoveries.took(parser.recovered, tools)
            self.ended(generation)

        generation = Generation(
            tokenizer=self.tokenizer,
            parser=parser,
            stops=request.stop,
            on_events=on_events,
            prompt_tokens=len(prepared.ids),
            max_new_tokens=prepared.max_new_tokens,
            stop_ids=stop_ids,
            seed=seed,
            one_call=bool(tools)
            and (request.tool_choice is ToolChoice.NAMED or not request.parallel_tool_calls),
            opening=prepared.opening,
            on_ended=ended,
            turn_head=prepared.turn_head,
            on_turn=lambda turn: self.preparer.echo.record(turn, prepared.context),
        )
        sequence = self.submit(job, generation)
        if request.statistics:
            generation.statistics = lambda: statistics_of(sequence, generation)
        generation.written = lambda: sequence.written_tokens
        if guide is not None:
            loop = asyncio.get_running_loop()
            guide.when_failed(lambda error: call_on(loop, generation.cancel, error))
        return generation

    def submit(self, job: Job, generation: Tracked) -> Sequence:
        """Queue a job whose sink is `generation`, and count it until `ended` hears of it. Raises
        what Scheduler.submit raises."""
        sequence = self.scheduler.submit(job, generation)
        generation.attach(lambda error: self.scheduler.cancel(sequence, error))
        self._live.add(generation)
        self._counts.started.inc()
        self._counts.live.set(len(self._live))
        return sequence

    def _forced(self, request: Request) -> Ids | None:
        """Ids that the engine must sample, with the end of the turn behind them."""
        if request.force is None or not self._test_hooks:
            return None
        end = np.array(self.model.stop_ids[:1], np.int32)
        text = Rendered(request.force, False)
        return np.concatenate([self.tokenizer.encode_rendered(text), end])

    def ended(self, generation: Tracked) -> None:
        """A generation is over."""
        self._live.discard(generation)
        counts = self._counts
        counts.live.set(len(self._live))
        if generation.error is not None:
            counts.ended[generation.error.code].inc()
        elif generation.reason is not None:
            counts.ended[generation.reason.value].inc()
        begun = generation.created_at
        if generation.admitted_at is not None:
            counts.queue.observe(generation.admitted_at - begun)
        if generation.first_token_at is not None:
            counts.first.observe(generation.first_token_at - begun)
        if generation.ended_at is not None:
            counts.total.observe(generation.ended_at - begun)

    def close(self) -> None:
        self.preparer.close()
        self._guides.close()
        self._recoveries.close()
