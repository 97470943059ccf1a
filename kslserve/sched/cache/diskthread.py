"""The one thread that touches checkpoint files, but for a helper that it waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class DiskThread:
    """Runs work in order; results are reported on the loop that was running at the call."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="disk")

    def run(self, work: Callable[[], Any], done: Callable[[Any, Exception | None], None]) -> None:
        loop = asyncio.get_running_loop()

        def body() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as caught:
                error = caught
            # The loop may be gone when the process ends in a hurry.
            if not loop.is_closed():
                loop.call_soon_threadsafe(done, result, error)

        self._worker.submit(body)

    async def settle(self, timeout_s: float) -> None:
        """Wait until everything that was given to it is done, or the time is over."""
        settled = asyncio.Event()
        self.run(lambda: None, lambda result, error: settled.set())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(settled.wait(), timeout_s)

    def close(self) -> None:
        """Drop what has not begun, finish what has."""
        self._worker.shutdown(wait=True, cancel_futures=True)
