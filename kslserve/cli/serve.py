"""The serve command: one process, one event loop, one server."""

from __future__ import annotations

import asyncio
import os
import sys

from kslserve import log
from kslserve.app import EXIT_FATAL, App, new_loop
from kslserve.config import Loaded

# Seconds. A thread that wants the interpreter waits this long at most for one that does not yield.
SWITCH_INTERVAL_S = 0.0005


def run(loaded: Loaded) -> int:
    """Serve until a signal; returns the exit status. Raises UsageError when it cannot start."""
    log.setup(loaded.settings.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    app = App(loaded.settings)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        status = runner.run(app.run())
    if status == EXIT_FATAL:
        # A failed engine may never join its threads, so nothing is taken down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
