"""Prompts off the loop: render and tokenize in one worker thread, with a bounded queue before it.

A prompt repeats most of the one before it, and must do so token for token to find its cached state:
segments are tokenized once, and a turn that was generated here goes in as the ids that it was
generated as, where the reasoning of the history is kept.

Rendering holds the GIL for a few milliseconds and tokenizing releases it, so one worker keeps the
event loop turning whatever the size of a prompt. One that hardly fits, such as a log of megabytes,
is tokenized beside the worker, where it holds nobody up.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from kslserve import heap
from kslserve.core.request import Request, Role, ToolChoice
from kslserve.engine.types import Ids
from kslserve.errors import ContextLengthExceeded, QueueFull, Unavailable
from kslserve.service.echo import EchoTable, contexts
from kslserve.text.rendered import Rendered
from kslserve.text.segments import SegmentCache, Splice
from kslserve.text.template import ChatTemplate
from kslserve.text.tokenizer import Tokenizer

Result = TypeVar("Result")
# Characters for each token of the window: hardly a longer prompt fits.
_LONG_TEXT = 8
# What closes an open thinking block when the output has to begin with a call.
_CLOSE_THINKING = "\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt. text: as rendered. ids: int32 [n], the exact ones of turns that came back.
    thinking_open: output starts inside the reasoning. opening: the last part of text, which counts
    as output for the parser. boundaries: positions, ascending, up to which later prompts are likely
    to be the same. turn_head: the ids from the start of the turn to be generated on, None where an
    old turn is continued. context: names the conversation to the echo table."""

    text: str
    ids: Ids
    thinking_open: bool
    max_new_tokens: int
    opening: str = ""
    boundaries: tuple[int, ...] = ()
    turn_head: Ids | None = None
    context: bytes = b""


class _LongText(Exception):
    """The prompt is not one for the worker."""


class Preparer:
    """context: tokens of prompt and output together. preserve: keep the reasoning of the history
    unless the request says otherwise. queue_max: requests that may wait for the worker. echo: the
    turns that were generated; whoever generates adds to it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        context: int,
        *,
        preserve: bool = True,
        queue_max: int = 256,
        echo: EchoTable | None = None,
    ) -> None:
        self.context = context
        self._tokenizer = tokenizer
        self._template = template
        self._preserve = preserve
        self._queue_max = queue_max
        self.echo = EchoTable() if echo is None else echo
        self._segments = SegmentCache(tokenizer)
        self._pending = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="count")

    @property
    def pending(self) -> int:
        return self._pending

    @property
    def text_bytes(self) -> int:
        """Of texts and ids that are remembered; each kind has a bound."""
        return self.echo.size_bytes + self._segments.size_bytes

    async def prepare(self, request: Request) -> Prepared:
        """Raises QueueFull, ContextLengthExceeded, Unavailable, or InvalidRequest for messages that
        the template refuses."""

        def short() -> Prepared:
            return self.prepare_now(request, _LONG_TEXT * self.context)

        try:
            return await self._queued(short)
        except _LongText:
            return await self._queued(lambda: self._prepare_long(request), self._beside)

    async def tokenize(self, texts: Sequence[str]) -> list[Ids]:
        """int32 ids of texts as they are, without a template; control tokens count. Raises
        QueueFull or Unavailable."""
        encode = self._tokenizer.encode_rendered
        long = sum(map(len, texts)) > _LONG_TEXT * self.context
        return await self._queued(
            lambda: [encode(Rendered(text, False)) for text in texts],
            self._beside if long else None,
        )

    async def _queued(
        self, work: Callable[[], Result], worker: ThreadPoolExecutor | None = None
    ) -> Result:
        """The result of `work` in a thread, by default that of the worker."""
        if self._pending >= self._queue_max:
            raise QueueFull("Too many requests are waiting; try again later.")
        self._pending += 1
        try:
            try:
                loop = asyncio.get_running_loop()
                result = loop.run_in_executor(worker or self._worker, work)
            except RuntimeError as error:  # the worker was closed
                raise Unavailable("The server is shutting down.") from error
            return await result
        finally:
            self._pending -= 1

    async def count(self, request: Request) -> int:
        """Tokens of the prompt that `prepare` would make, however many. Runs beside it, one at a
        time, so that counting holds no generation up. Raises Unavailable, or InvalidRequest for
        messages that the template refuses."""
        loop = asyncio.get_running_loop()
        try:
            work = loop.run_in_executor(self._beside, self._encode, request)
        except RuntimeError as error:  # the worker was closed
            raise Unavailable("The server is shutting down.") from error
        return len((await work).ids)

    def prepare_now(self, request: Request, most: int | None = None) -> Prepared:
        """The work itself, on the calling thread. most: characters of a prompt, or _LongText."""
        prepared = self._encode(request, most)
        room = self.context - len(prepared.ids)
        if room < 1:
            raise ContextLengthExceeded(len(prepared.ids), self.context)
        wanted = request.max_tokens
        return dataclasses.replace(
            prepared, max_new_tokens=room if wanted is None else min(wanted, room)
        )

    def _prepare_long(self, request: Request) -> Prepared:
        """The same, of a text for which the tokenizer takes memory of a hundred times its size."""
        try:
            return self.prepare_now(request)
        finally:
            heap.trim()

    def _encode(self, request: Request, most: int | None = None) -> Prepared:
        """The prompt, whatever its number of tokens; max_new_tokens is 0."""
        preserve = (
            self._preserve if request.preserve_thinking is None else request.preserve_thinking
        )
        rendered = self._template.prompt(
            request.messages,
            tuple(tool for tool in request.tools if not tool.deferred),
            thinking=request.thinking,
            effort=request.effort,
            preserve=preserve,
            extra=request.template_vars,
        )
        if most is not None and len(rendered.text) > most:
            raise _LongText
        opening = _opening(request)
        if opening:
            rendered = _open_call(rendered, opening)
        said = list(contexts(request.messages))
        splices = self._echoes(request, rendered, said) if preserve else ()
        segmented = self._segments.encode(rendered, splices)
        # The turn to be generated starts at the last boundary.
        new = rendered.new_turn is not None and segmented.boundaries
        return Prepared(
            text=rendered.text,
            ids=segmented.ids,
            thinking_open=rendered.thinking_open,
            max_new_tokens=0,
            opening=opening,
            boundaries=segmented.boundaries,
            turn_head=segmented.ids[segmented.boundaries[-1] :] if new else None,
            context=said[-1],
        )

    def _echoes(
        self, request: Request, rendered: Rendered, said: Sequence[bytes]
    ) -> Iterator[Splice]:
        """The turns of the history that were generated here. said: contexts of the messages."""
        echoes = (
            (message, context)
            for message, context in zip(request.messages, said, strict=False)
            if message.role is Role.ASSISTANT
        )
        # A last message that is empty or to be continued is not among the finished turns.
        for (start, end), (message, context) in zip(rendered.assistant_turns, echoes, strict=False):
            ids = self.echo.find(message, context)
            if ids is not None:
                yield Splice(start, end, ids)

    def close(self) -> None:
        """Stop the workers; what waits is dropped."""
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._beside.shutdown(wait=False, cancel_futures=True)


def _open_call(rendered: Rendered, opening: str) -> Rendered:
    """The prompt with the begin of a call after its reasoning, or after the text that it ends
    with."""
    gap = _CLOSE_THINKING if rendered.thinking_open else ""
    if not gap and not rendered.text.endswith("\n"):
        gap = "\n\n"
    return dataclasses.replace(rendered, text=rendered.text + gap + opening, thinking_open=False)


def _opening(request: Request) -> str:
    """The begin of a forced call, which the model only has to complete."""
    if request.tool_choice is ToolChoice.NAMED:
        return f"<tool_call>\n<function={request.tool_name}>\n"
    if request.tool_choice is ToolChoice.REQUIRED:
        return "<tool_call>\n<function="
    return ""
