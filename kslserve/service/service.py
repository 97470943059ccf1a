"""Service: what a handler needs to turn a core.Request into a running Generation.

Owns the preparer and the set of live generations; the scheduler owns sequences, app.py owns the
service. Runs on the event loop.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from kslserve.core.request import Request, ToolChoice
from kslserve.errors import InvalidRequest, KslError
from kslserve.metrics import Metrics
from kslserve.parse.stream import OutputParser
from kslserve.sched.scheduler import Job, Scheduler
from kslserve.service.generation import Generation, OnEvents
from kslserve.service.model import ServedModel
from kslserve.service.prepare import Prepared, Preparer
from kslserve.text.tokenizer import Tokenizer

SIDE_PROMPT_TOKENS = 2048
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
        self.queue = metrics.histogram("queue_seconds", "wait for admission", _SECONDS)
        self.first = metrics.histogram("first_token_seconds", "submit to first token", _SECONDS)
        self.total = metrics.histogram("generation_seconds", "submit to end", _SECONDS)


class Service:
    def __init__(
        self,
        model: ServedModel,
        tokenizer: Tokenizer,
        preparer: Preparer,
        scheduler: Scheduler,
        metrics: Metrics,
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self.preparer = preparer
        self._counts = _Counts(metrics)
        self._live: set[Generation] = set()

    @property
    def live(self) -> int:
        """Generations that have not ended."""
        return len(self._live)

    async def start(
        self, request: Request, on_events: OnEvents, new_call_id: Callable[[], str]
    ) -> Generation:
        """Prepare and submit. on_events gets every event of the generation, on the loop, after this
        returned. Raises InvalidRequest, ContextLengthExceeded, QueueFull or Unavailable."""
        self._check(request)
        prepared = await self.preparer.prepare(request)
        return self._submit(request, prepared, on_events, new_call_id)

    def cancel_all(self, error: KslError) -> None:
        """End every live generation with an error for its client."""
        for generation in list(self._live):
            generation.cancel(error)

    def _check(self, request: Request) -> None:
        for token, _ in request.sampling.logit_bias:
            if token >= self.model.vocab:
                raise InvalidRequest(
                    f"logit_bias names token {token}, but the vocabulary has {self.model.vocab}.",
                    param="logit_bias",
                )

    def _submit(
        self,
        request: Request,
        prepared: Prepared,
        on_events: OnEvents,
        new_call_id: Callable[[], str],
    ) -> Generation:
        seed = request.sampling.seed
        seed = secrets.randbits(_SEED_BITS) if seed is None else seed & _SEED_MASK
        tools_enabled = bool(request.tools) and request.tool_choice is not ToolChoice.NONE
        stop_ids = () if request.ignore_eos else self.model.stop_ids
        job = Job(
            prompt_ids=prepared.ids,
            max_new_tokens=prepared.max_new_tokens,
            sampling=request.sampling,
            seed=seed,
            stop_ids=stop_ids,
            priority=request.priority,
            side=not request.tools and len(prepared.ids) < SIDE_PROMPT_TOKENS,
        )
        generation = Generation(
            tokenizer=self._tokenizer,
            parser=OutputParser(
                request.tools,
                thinking=prepared.thinking_open,
                tools_enabled=tools_enabled,
                make_id=new_call_id,
            ),
            stops=request.stop,
            on_events=on_events,
            prompt_tokens=len(prepared.ids),
            max_new_tokens=prepared.max_new_tokens,
            stop_ids=stop_ids,
            seed=seed,
            one_call=tools_enabled
            and (request.tool_choice is ToolChoice.NAMED or not request.parallel_tool_calls),
            opening=prepared.opening,
            on_ended=self._ended,
        )
        sequence = self.scheduler.submit(job, generation)
        generation.attach(lambda error: self.scheduler.cancel(sequence, error))
        self._live.add(generation)
        self._counts.started.inc()
        self._counts.live.set(len(self._live))
        return generation

    def _ended(self, generation: Generation) -> None:
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
