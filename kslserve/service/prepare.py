"""Prompts off the loop: render and tokenize in one worker thread, with a bounded queue before it.

Rendering holds the GIL for a few milliseconds and tokenizing releases it, so one worker keeps the
event loop turning whatever the size of a prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kslserve.core.request import Request, ToolChoice
from kslserve.engine.types import Ids
from kslserve.errors import ContextLengthExceeded, QueueFull, Unavailable
from kslserve.text.rendered import Rendered
from kslserve.text.template import ChatTemplate
from kslserve.text.tokenizer import Tokenizer

# What closes an open thinking block when the output has to begin with a call.
_CLOSE_THINKING = "\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt. ids: int32 [n]. thinking_open: output starts inside the reasoning. opening: the
    last part of text, which counts as output for the parser."""

    text: str
    ids: Ids
    thinking_open: bool
    max_new_tokens: int
    opening: str = ""


class Preparer:
    """context: tokens of prompt and output together. preserve: keep the reasoning of the history
    unless the request says otherwise. queue_max: requests that may wait for the worker."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        context: int,
        *,
        preserve: bool = True,
        queue_max: int = 256,
    ) -> None:
        self.context = context
        self._tokenizer = tokenizer
        self._template = template
        self._preserve = preserve
        self._queue_max = queue_max
        self._pending = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prepare")

    @property
    def pending(self) -> int:
        return self._pending

    async def prepare(self, request: Request) -> Prepared:
        """Raises QueueFull, ContextLengthExceeded, Unavailable, or InvalidRequest for messages that
        the template refuses."""
        if self._pending >= self._queue_max:
            raise QueueFull("Too many requests are waiting; try again later.")
        self._pending += 1
        try:
            loop = asyncio.get_running_loop()
            try:
                work = loop.run_in_executor(self._worker, self.prepare_now, request)
            except RuntimeError as error:  # the worker was closed
                raise Unavailable("The server is shutting down.") from error
            return await work
        finally:
            self._pending -= 1

    def prepare_now(self, request: Request) -> Prepared:
        """The work itself, on the calling thread."""
        preserve = (
            self._preserve if request.preserve_thinking is None else request.preserve_thinking
        )
        rendered = self._template.prompt(
            request.messages,
            request.tools,
            thinking=request.thinking,
            effort=request.effort,
            preserve=preserve,
            extra=request.template_vars,
        )
        opening = _opening(request)
        if opening:
            rendered = _open_call(rendered, opening)
        ids = self._tokenizer.encode_rendered(rendered)
        room = self.context - len(ids)
        if room < 1:
            raise ContextLengthExceeded(len(ids), self.context)
        wanted = request.max_tokens
        return Prepared(
            text=rendered.text,
            ids=ids,
            thinking_open=rendered.thinking_open,
            max_new_tokens=room if wanted is None else min(wanted, room),
            opening=opening,
        )

    def close(self) -> None:
        """Stop the worker; what waits is dropped."""
        self._worker.shutdown(wait=False, cancel_futures=True)


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
