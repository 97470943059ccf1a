"""Guides: from a request to what holds its generation to what the client asked for.

Grammars are compiled in a worker before admission, so that a schema that cannot be compiled is the
client's error. Masks are made by two more threads, which run only once there is a mask to make.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from kslserve.core.request import Request, ToolChoice
from kslserve.errors import InvalidRequest, Unavailable
from kslserve.service.constrain import Constraint
from kslserve.service.grammar import GrammarError, Grammars, compile_schema
from kslserve.service.stage import Kit, Rules
from kslserve.service.toolgrammar import ToolGrammar, is_strict
from kslserve.text.tokenizer import Tokenizer

THREADS = 2


class Guides:
    """One per server."""

    def __init__(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        self._tokenizer = tokenizer
        self.grammars = grammars
        self._kit: Kit | None = None
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._queue: SimpleQueue[Constraint | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    async def make(self, request: Request, *, thinking_open: bool) -> Constraint | None:
        """The guide of a generation, None where nothing has to be held. thinking_open: it starts
        inside the reasoning. Raises InvalidRequest for a schema that cannot be compiled."""
        if not _wanted(request, thinking_open):
            return None
        try:
            work = asyncio.get_running_loop().run_in_executor(
                self._compiler, self.make_now, request, thinking_open
            )
        except RuntimeError as error:  # the worker was closed
            raise Unavailable("The server is shutting down.") from error
        return await work

    def make_now(self, request: Request, thinking_open: bool) -> Constraint:
        """The work itself, on the calling thread."""
        if self._kit is None:
            self._kit = Kit(self._tokenizer, self.grammars)
        rules = self._rules(self._kit, request, thinking_open)
        made = Constraint(self._kit, rules, self._later)
        if made.failed:
            path = request.response_format.path if request.response_format else "tools"
            raise InvalidRequest(
                f"{path} cannot be enforced: it allows nothing, or is too complex.", param=path
            )
        return made

    def close(self) -> None:
        """Stop the workers; what waits is dropped."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        for _ in self._threads:
            self._queue.put(None)

    def _rules(self, kit: Kit, request: Request, thinking_open: bool) -> Rules:
        rules = Rules(reasoning=thinking_open, budget=request.reasoning_budget)
        wanted = request.response_format
        if wanted is not None:
            try:
                rules.answer = compile_schema(
                    self.grammars, wanted.schema, lenient=not wanted.strict
                )
            except GrammarError as error:
                raise InvalidRequest(
                    f"{wanted.path} cannot be enforced: {error}.", param=wanted.path
                ) from error
        rules.tools = {tool.name: tool for tool in request.callable_tools}
        if not rules.tools:
            return rules
        for index, tool in enumerate(request.tools):
            if tool.name in rules.tools and is_strict(tool):
                try:
                    rules.strict[tool.name] = ToolGrammar(tool, kit.call_close, self.grammars)
                except GrammarError as error:
                    raise InvalidRequest(
                        f"The parameters of the strict tool {tool.name} cannot be enforced: "
                        f"{error}.",
                        param=f"tools[{index}]",
                    ) from error
        rules.names_held = bool(rules.strict) or request.allowed_tools is not None
        rules.name_opened = request.tool_choice is ToolChoice.REQUIRED
        rules.call = request.tool_name if request.tool_choice is ToolChoice.NAMED else None
        return rules

    def _later(self, constraint: Constraint) -> None:
        while len(self._threads) < THREADS:
            thread = threading.Thread(target=self._run, name="mask", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put(constraint)

    def _run(self) -> None:
        while (constraint := self._queue.get()) is not None:
            constraint.work()


def _wanted(request: Request, thinking_open: bool) -> bool:
    if request.response_format is not None:
        return True
    if request.reasoning_budget is not None and thinking_open:
        return True
    tools = request.callable_tools
    if not tools:
        return False
    if request.tool_choice is ToolChoice.REQUIRED or request.allowed_tools is not None:
        return True
    return any(map(is_strict, tools))
