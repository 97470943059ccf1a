"""Text completions: several prompts of one request, each a timeline of its own, without template
and parser."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import numpy as np

from kslserve.core.events import Event, Failed, Finished, Started
from kslserve.core.usage import FinishReason, Statistics, Usage
from kslserve.engine.types import Ids
from kslserve.errors import ContextLengthExceeded, InvalidRequest, KslError, QueueFull
from kslserve.sched.scheduler import Job
from kslserve.service.completion import Completion, CompletionOptions
from kslserve.service.generation import OnEvents
from kslserve.service.service import Service, is_aside, new_seed
from kslserve.service.statistics import statistics_of

PARALLEL = 8  # prompts of one request that run or wait at a time


async def start_completions(
    service: Service, options: CompletionOptions, on_events: OnEvents
) -> Completions:
    """Tokenize and submit. Raises InvalidRequest, ContextLengthExceeded, QueueFull or
    Unavailable; on_events hears of what happens after this returned."""
    texts = [prompt for prompt in options.prompts if isinstance(prompt, str)]
    tokenized = iter(await service.preparer.tokenize(texts) if texts else ())
    prompts: list[tuple[str | None, Ids]] = []
    for index, prompt in enumerate(options.prompts):
        if isinstance(prompt, str):
            text, ids = prompt, next(tokenized)
        else:
            text, ids = None, np.array(prompt, np.int32)
        _check(index, ids, service)
        prompts.append((text, ids))
    service.check_sampling(options.sampling)
    completions = Completions(service, options, prompts, on_events)
    completions.launch()
    return completions


def _check(index: int, ids: Ids, service: Service) -> None:
    path = f"prompt[{index}]"
    if not len(ids):
        raise InvalidRequest(f"{path} must not be empty.", param=path)
    if int(ids.min()) < 0 or int(ids.max()) >= service.model.vocab:
        raise InvalidRequest(
            f"{path} must have token ids from 0 to {service.model.vocab - 1}.", param=path
        )
    if len(ids) >= service.scheduler.window:
        raise ContextLengthExceeded(len(ids), service.scheduler.window)


class Completions:
    """All completions of one request behind one face: one Started, one terminal event. The first
    failure ends all of them."""

    def __init__(
        self,
        service: Service,
        options: CompletionOptions,
        prompts: Iterable[tuple[str | None, Ids]],
        on_events: OnEvents,
    ) -> None:
        self.seed = new_seed(options.sampling.seed)
        self.usage = Usage(statistics=Statistics() if options.statistics else None)
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.reason: FinishReason | None = None
        self._service = service
        self._options = options
        self._on_events = on_events
        self._waiting = deque(enumerate(prompts))
        self._running: set[Completion] = set()
        self._error: KslError | None = None
        self._reason = FinishReason.STOP
        self.usage.prompt_tokens = sum(len(ids) for _, (_, ids) in self._waiting)

    def launch(self) -> None:
        """Submit prompts up to the number that may run at a time. While one runs, a full queue
        only makes the others wait for its end."""
        while self._waiting and len(self._running) < PARALLEL:
            index, (text, ids) = self._waiting[0]
            completion = Completion(self, self._service.tokenizer, self._options, index, text, ids)
            try:
                job = self._job(ids, completion.max_new_tokens)
                completion.sequence = self._service.submit(job, completion)
            except QueueFull:
                if not self._running:
                    raise
                return
            self._waiting.popleft()
            self._running.add(completion)

    def cancel(self) -> None:
        """The client has left."""
        self._reason = FinishReason.CANCELLED
        self._drop(None)

    # ------------------------------------------------------------ called by its completions

    def began(self, cached_tokens: int) -> None:
        self.usage.cached_tokens += cached_tokens
        if self.admitted_at is None:
            self.admitted_at = time.monotonic()
            self._on_events([Started()])

    def say(self, events: list[Event]) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        if self._error is None:
            self._on_events(events)

    def over(self, completion: Completion, events: list[Event]) -> None:
        """One has ended; its last events go out with those of the whole request, if it was the
        last."""
        self._service.ended(completion)
        self._running.discard(completion)
        if self.usage.statistics is not None and completion.sequence is not None:
            self.usage.statistics.add(statistics_of(completion.sequence, completion))
        error = completion.error
        if error is None and self._reason is not FinishReason.CANCELLED:
            try:
                self.launch()
            except KslError as refused:
                error = refused
        if error is not None and self._error is None:
            self._error = error
            self._drop(error)
        if self._running:
            if events and self._error is None:
                self._on_events(events)
        elif self._error is not None:
            self._on_events([Failed(self._error, self.usage)])
        else:
            self.reason = self._reason
            self._on_events([*events, Finished(self._reason, self.usage)])

    def _drop(self, error: KslError | None) -> None:
        self._waiting.clear()
        for completion in list(self._running):
            completion.cancel(error)

    def _job(self, ids: Ids, max_new_tokens: int) -> Job:
        options = self._options
        return Job(
            prompt_ids=ids,
            max_new_tokens=max_new_tokens,
            sampling=options.sampling,
            seed=self.seed,
            stop_ids=() if options.ignore_eos else self._service.model.stop_ids,
            priority=options.priority,
            side=is_aside(ids),
            score=options.echo and options.sampling.logprobs is not None,
        )
