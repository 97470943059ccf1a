"""Preparer: a request becomes ids, within the window."""

from __future__ import annotations

import asyncio
import functools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kslserve.core.request import Message, Request, Role, ToolChoice, ToolSpec
from kslserve.errors import ContextLengthExceeded, InvalidRequest, QueueFull, Unavailable
from kslserve.service.prepare import Preparer
from kslserve.text.template import ChatTemplate, bundled
from kslserve.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2] / "data"
LS = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}
TOOL = ToolSpec("ls", LS, {"type": "object"})


@functools.cache
def texts() -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = Tokenizer((DATA / "nano_tokenizer.json").read_bytes())
    return tokenizer, ChatTemplate(bundled("3.5"), tokenizer.control_tokens)


def preparer(context: int = 4096, **more: Any) -> Preparer:
    return Preparer(*texts(), context, **more)


def request(text: str = "hi", **more: Any) -> Request:
    return Request("m", (Message(Role.USER, text),), **more)


def test_a_prompt() -> None:
    prepared = preparer().prepare_now(request())
    assert prepared.text.endswith("<|im_start|>assistant\n<think>\n")
    assert prepared.thinking_open
    assert prepared.ids.dtype == np.int32
    assert prepared.max_new_tokens == 4096 - len(prepared.ids)
    assert prepared.opening == ""


def test_output_is_clamped_to_the_window() -> None:
    prompt = len(preparer().prepare_now(request()).ids)
    assert preparer().prepare_now(request(max_tokens=10)).max_new_tokens == 10
    assert preparer().prepare_now(request(max_tokens=10**9)).max_new_tokens == 4096 - prompt
    assert preparer(prompt + 1).prepare_now(request()).max_new_tokens == 1
    with pytest.raises(ContextLengthExceeded) as caught:
        preparer(prompt).prepare_now(request())
    assert (caught.value.prompt_tokens, caught.value.limit_tokens) == (prompt, prompt)


def test_forced_calls_open_after_closed_reasoning() -> None:
    choice: dict[str, Any] = {"tools": (TOOL,), "tool_choice": ToolChoice.NAMED, "tool_name": "ls"}
    prepared = preparer().prepare_now(request(**choice))
    assert prepared.opening == "<tool_call>\n<function=ls>\n"
    assert prepared.text.endswith("<think>\n\n</think>\n\n" + prepared.opening)
    assert not prepared.thinking_open
    assert preparer().prepare_now(request(**choice, thinking=False)).text == prepared.text
    choice["tool_choice"] = ToolChoice.REQUIRED
    assert preparer().prepare_now(request(**choice)).text.endswith("<tool_call>\n<function=")


def test_none_still_renders_the_tools() -> None:
    prepared = preparer().prepare_now(request(tools=(TOOL,), tool_choice=ToolChoice.NONE))
    assert '"name": "ls"' in prepared.text
    assert prepared.opening == ""


def test_preserve_thinking_is_the_requests_choice() -> None:
    history = (
        Message(Role.USER, "a"),
        Message(Role.ASSISTANT, "b", reasoning="because"),
        Message(Role.USER, "c"),
    )
    for server, wanted, kept in [
        (True, None, True), (False, None, False), (True, False, False), (False, True, True),
    ]:  # fmt: skip
        made = preparer(preserve=server).prepare_now(
            Request("m", history, preserve_thinking=wanted)
        )
        assert ("because" in made.text) is kept


def test_messages_without_a_user() -> None:
    with pytest.raises(InvalidRequest):
        preparer().prepare_now(Request("m", (Message(Role.SYSTEM, "x"),)))


async def test_a_prompt_that_hardly_fits_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made, behind = preparer(context=500), threading.Event()
    encode, plain = made._segments.encode, made._tokenizer.encode_rendered

    def slow(text: str) -> None:
        if len(text) > 4000:
            assert behind.wait(20)

    monkeypatch.setattr(
        made._segments, "encode", lambda r, splices: (slow(r.text), encode(r, splices))[1]
    )
    tokenizer = SimpleNamespace(encode_rendered=lambda r: (slow(r.text), plain(r))[1])
    monkeypatch.setattr(made, "_tokenizer", tokenizer)
    for long in (made.prepare(request("word " * 4000)), made.tokenize(["word " * 4000])):
        work = asyncio.ensure_future(long)
        await asyncio.sleep(0)
        assert len((await made.prepare(request())).ids) < 500
        assert not work.done()
        behind.set()
        (found,) = await asyncio.gather(work, return_exceptions=True)
        if not isinstance(found, ContextLengthExceeded):
            assert len(found[0]) > 500
        behind.clear()
    assert made.pending == 0


async def test_the_worker_and_its_queue() -> None:
    made = preparer(queue_max=2)
    works = [asyncio.ensure_future(made.prepare(request(str(i)))) for i in range(2)]
    await asyncio.sleep(0)
    assert made.pending == 2
    with pytest.raises(QueueFull):
        await made.prepare(request())
    for i, work in enumerate(works):
        assert f"user\n{i}<|im_end|>" in (await work).text
    assert made.pending == 0
    made.close()
    with pytest.raises(Unavailable):
        await made.prepare(request())
