"""The whole life of a process whose engine is lost or does not end, in this one: nothing touches it
any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kslserve import app as application
from kslserve.app import EXIT_FATAL, App
from kslserve.config import Settings
from kslserve.engine.fake import FakeEngine
from kslserve.sched.scheduler import Scheduler


async def test_a_lost_engine_is_neither_saved_nor_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of memory that cannot be trusted must not reach the disk."""
    touched: list[str] = []

    def spy(owner: Any, name: str) -> None:
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: touched.append(name))

    cache = tmp_path / "cache"
    settings = Settings(
        engine="fake", port=0, context=2048, watchdog_loop_s=0.0, prefix_cache_dir=str(cache)
    )
    app = App(settings)
    ended = asyncio.create_task(app.run())
    while not app.state.ready:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.01)
    engine = app.engine
    assert isinstance(engine, FakeEngine)
    engine.faults.fatal.update(range(1, 1000))
    address = app.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    body = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"word " * 900)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    spy(FakeEngine, "close")
    spy(Scheduler, "flush")
    writer.write(head % len(body) + body)
    assert (await reader.readline()).startswith(b"HTTP/1.1 503 ")
    spy(FakeEngine, "submit")
    writer.close()
    assert await asyncio.wait_for(ended, 30) == EXIT_FATAL
    assert touched == []
    assert not list(cache.glob("*.kslckpt"))


async def test_a_wave_that_does_not_end_cannot_hold_up_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(application, "_STOP_SLACK_S", 0.1)
    app = App(Settings(engine="fake", port=0, context=2048, watchdog_loop_s=0.0, grace_s=0.05))
    await app.start()
    engine = app.engine
    assert isinstance(engine, FakeEngine)
    engine.faults.slow[1] = 3600.0
    address = app.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    while not engine.progress().submitted:  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.01)
    closed: list[bool] = []
    monkeypatch.setattr(FakeEngine, "close", lambda self: closed.append(True))
    assert await asyncio.wait_for(app.stop(), 20) == EXIT_FATAL
    assert closed == []
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"The server is shutting down." in answer
    writer.close()
    app._watchdog.stop()
