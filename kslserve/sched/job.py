"""What is asked of the scheduler, and who hears of it: a job, the guide of its output, its sink."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.types import Ids
from kslserve.errors import ContextLengthExceeded, InvalidRequest, KslError


@dataclass(slots=True, eq=False)
class Job:
    """What to generate. prompt_ids: int32 [n], n >= 1. max_new_tokens >= 1. priority: lower runs
    first; side: a short request beside the main work, first among equals. forced: int32 ids that
    the engine must sample (engines opened with test hooks only). boundaries: positions of the
    prompt, ascending, before which later prompts will be the same; the last one is where the turns
    end and the opening of the answer begins. score: report the log-probability of every prompt
    token but the first, beside `sampling.logprobs` most likely ones; nothing of the prompt comes
    from a checkpoint then. guide: says what may be sampled, None for anything."""

    prompt_ids: Ids
    max_new_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    side: bool = False
    forced: Ids | None = None
    boundaries: tuple[int, ...] = ()
    score: bool = False
    guide: Guide | None = None

    def check(self, window: int) -> None:
        """Raises InvalidRequest or ContextLengthExceeded for what no sequence of so many tokens can
        be."""
        prompt = len(self.prompt_ids)
        if prompt < 1 or self.max_new_tokens < 1:
            raise InvalidRequest("A generation needs a prompt and at least one output token.")
        if prompt >= window:
            raise ContextLengthExceeded(prompt, window)


class Guide(Protocol):
    """Says which ids one sequence may sample. Called on the loop. Its sequence never drafts.

    ready: `mask` is that of the next position, uint32 [ceil(vocab / 32)] or None for no mask; until
    then nothing can be sampled. version: changes with the mask, 0 while there was none."""

    @property
    def ready(self) -> bool: ...
    @property
    def mask(self) -> npt.NDArray[np.uint32] | None: ...
    @property
    def version(self) -> int: ...

    def advance(self, ids: Items[int]) -> list[int]:
        """Ids that a wave sampled, not the last ones of the sequence. Returns those that must come
        next: they count as sampled, and are not to be given to `advance`."""

    def wait(self, timeout_s: float) -> bool:
        """Block for at most the time; True if it is ready."""

    def when_ready(self, callback: Callable[[], None]) -> None:
        """Have `callback` called when it is ready, perhaps in another thread, perhaps now."""


class Sink(Protocol):
    """Hears of one sequence, on the event loop, after the next wave was submitted. Never called
    from inside `submit` or `cancel`. A method that raises ends the sequence."""

    def admitted(self, cached_tokens: int) -> None:
        """The sequence holds its memory and runs. cached_tokens: prompt positions that were not
        computed for it. Once, also where it is preempted later."""

    def tokens(self, ids: Items[int], logprobs: list[list[tuple[int, float]]] | None) -> None:
        """Sampled ids of one wave, a stop id included. logprobs: per id [(id, logprob), top...].
        Of a job with `score`, before its first id: no ids, and the log-probabilities of the next
        prompt tokens."""

    def ended(self, reason: FinishReason, error: KslError | None) -> None:
        """Nothing follows. Exactly once. error: set when it failed (reason is then CANCELLED)."""
