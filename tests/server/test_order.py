"""Who comes first, over the wire: `priority` of every dialect, side requests, giving way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kslserve.config import Settings
from kslserve.engine.fake import FakeEngine
from kslserve.sched.scheduler import Job
from tests.server.api_cases import post
from tests.server.serving import Server, script_settings, serving

QUICK = {"chunks": ["done"], "end": "stop", "thinking": False}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = {
    CHAT: {"type": "function", "function": {"name": "read", "parameters": SCHEMA}},
    MESSAGES: {"name": "read", "input_schema": SCHEMA},
    RESPONSES: {"type": "function", "name": "read", "parameters": SCHEMA},
}
each_dialect = pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("script")
    with serving(script_settings(folder, [QUICK], context=8192, max_seqs=1)) as running:
        yield running


@pytest.fixture
def jobs(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What the scheduler is asked."""
    service = server.app.state.service
    assert service is not None
    seen: list[Job] = []
    submit = service.scheduler.submit

    def spy(job: Job, sink: Any) -> Any:
        seen.append(job)
        return submit(job, sink)

    monkeypatch.setattr(service.scheduler, "submit", spy)
    return seen


def body(path: str, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    asked = {
        CHAT: {"messages": messages},
        COMPLETIONS: {"prompt": text},
        MESSAGES: {"messages": messages, "max_tokens": 4000},
        RESPONSES: {"input": text},
    }[path]
    return {"model": "m", **asked, **more}


def ask(server: Server, path: str, text: str, **more: Any) -> Any:
    status, _, answer = post(server, path, json.dumps(body(path, text, **more)).encode())
    assert status == 200, answer
    return json.loads(answer)


@each_dialect
def test_every_dialect_has_priorities(server: Server, jobs: list[Job], path: str) -> None:
    ask(server, path, "Hello")
    ask(server, path, "Hello", priority=3)
    ask(server, path, "Hello", priority=-7)
    assert [job.priority for job in jobs] == [0, 3, -7]


@each_dialect
def test_side_requests_are_short_and_without_tools(
    server: Server, jobs: list[Job], path: str
) -> None:
    ask(server, path, "A title for this, please.")
    ask(server, path, "word " * 2100)
    assert [job.side for job in jobs] == [True, False]
    if path in TOOLS:
        ask(server, path, "What is in notes.txt?", tools=[TOOLS[path]])
        assert not jobs[-1].side


def test_one_that_matters_more_interrupts_and_loses_nothing() -> None:
    """With one place: the long answer stands while the other one is made, and is what it would have
    been."""
    free = {"seed": 5, "max_tokens": 300, "ignore_eos": True}
    with serving(Settings(engine="fake", context=4096, max_seqs=1)) as server:
        engine = server.app.engine
        assert isinstance(engine, FakeEngine)
        expected = ask(server, CHAT, "Go on.", **free)["choices"]
        engine._wave_s = 0.003
        interrupted: list[Any] = []
        ask_long = partial(ask, server, CHAT, "Go on.", priority=1, **free)
        thread = threading.Thread(target=lambda: interrupted.append(ask_long()["choices"]))
        thread.start()
        while server.metric('requests{state="decoding"}') < 1:
            time.sleep(0.005)
        assert ask(server, CHAT, "Hi", max_tokens=5)["usage"]["completion_tokens"] == 5
        assert not interrupted
        thread.join(30)
        assert interrupted == [expected]
        assert server.metric('scheduler_events_total{kind="preemption"}') == 1
