"""Work that blocks, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from kslserve import log

_log = log.get("app")
T = TypeVar("T")


async def in_thread(work: Callable[[], T], name: str) -> T:
    """The result of `work` in a thread of its own, which dies with the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def body() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(deliver, result, error)
        except RuntimeError:
            _log.debug("nobody waits any more", thread=name)

    threading.Thread(target=body, name=name, daemon=True).start()
    return await future
