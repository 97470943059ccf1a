"""Real servers for tests: in a thread of this process, or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kslserve.app import App, new_loop
from kslserve.config import Settings

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 60


class Server:
    """A server in a thread with a loop of its own. `app` may be looked into by way of `call`."""

    def __init__(self, settings: Settings) -> None:
        self.out = io.StringIO()
        self.app = App(dataclasses.replace(settings, port=0, watchdog_loop_s=0.0), out=self.out)
        self.loop = new_loop()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.app.start(), self.loop).result(START_LIMIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    @property
    def url(self) -> str:
        return self.app.url

    @property
    def root(self) -> str:
        return self.app.address.url

    def call(self, work: Any) -> Any:
        """`work()` on the server's loop."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(START_LIMIT_S)

    def metric(self, name: str) -> float:
        return metric_of(get_text(self.root + "/metrics"), name)

    def close(self) -> None:
        """Stop, and assert that nothing is left behind."""
        service = self.app.state.service
        assert service is not None
        status = asyncio.run_coroutine_threadsafe(self.app.stop(), self.loop).result(START_LIMIT_S)
        assert status == 0
        assert service.live == 0
        self.call(service.scheduler.check)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(START_LIMIT_S)
        self.loop.close()


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[Server]:
    server = Server(settings)
    try:
        yield server
    finally:
        server.close()


def script_settings(folder: Path, outputs: list[dict[str, Any]], **more: Any) -> Settings:
    """Settings of a scripted server; the script goes into `folder`."""
    path = folder / "script.json"
    path.write_text(json.dumps({"outputs": outputs}), encoding="utf-8")
    return Settings(engine="scripted", script=str(path), **more)


def get_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def metric_of(text: str, name: str) -> float:
    found = re.search(rf"^kslserve_{re.escape(name)} (\S+)$", text, re.M)
    assert found is not None, name
    return float(found.group(1))


class Process:
    """`python -m kslserve` with flags; `url` once it says that it is ready. program: another module
    and what comes before the flags."""

    def __init__(self, *flags: str, program: tuple[str, ...] = ("kslserve",)) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", *program, "--port", "0", *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if not k.startswith("KSL_")},
        )
        self.lines: list[str] = []
        self.url = ""

    def wait_line(self, beginning: str) -> str:
        """Read the start message up to a line; fails when the process ends first."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(beginning):
                return line.rstrip("\n")
        _, errors = self.process.communicate(timeout=START_LIMIT_S)
        raise AssertionError(f"ended with {self.process.returncode}: {errors}")

    def wait_ready(self) -> str:
        self.url = self.wait_line("ready ").split()[-1]
        return self.url

    def finish(self) -> tuple[int, str, str]:
        """(exit status, rest of stdout, stderr) once it has ended by itself."""
        out, errors = self.process.communicate(timeout=START_LIMIT_S)
        return self.process.returncode, out, errors

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=START_LIMIT_S)
