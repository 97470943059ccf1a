"""Composition root: builds the objects, starts and stops them in order.

Start: socket (answers 503), model and engine in a thread, scheduler, service, ready. Stop: refuse
new work, close the socket, let live generations run for the grace time, end the rest, close the
engine. An engine that has failed or stalled is not touched again: its state must not be trusted.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import sys
from functools import partial
from typing import Any, TextIO

from kslserve import __version__, config, log
from kslserve.api import handlers
from kslserve.api.messages_parse import DefaultThinking
from kslserve.config import Settings
from kslserve.engine.types import Engine
from kslserve.errors import EngineError, UsageError
from kslserve.http.router import Router
from kslserve.http.server import Address, HttpServer
from kslserve.metrics import Metrics
from kslserve.sched.cache.diskthread import DiskThread
from kslserve.sched.cache.disktier import Disk
from kslserve.sched.scheduler import Scheduler
from kslserve.service.echo import EchoTable, Turn
from kslserve.service.prepare import Preparer
from kslserve.service.recoveries import Recoveries
from kslserve.service.service import Service
from kslserve.service.state import Phase, ServerState
from kslserve.service.turnstore import TurnStore
from kslserve.startup.backend import Backend, open_backend
from kslserve.startup.limits import http_limits, sched_limits
from kslserve.startup.thread import in_thread
from kslserve.watchdog import Watchdog

EXIT_OK = 0
EXIT_FATAL = 70
_FLUSH_S = 2.0  # for the last bytes of open responses
_ABORT_S = 0.5
_CACHE_FLUSH_S = 10.0  # for checkpoints on their way to disk
_STOP_SLACK_S = 10.0  # beyond the grace time, for the wave in flight

_log = log.get("app")


class App:
    """One server. `run` is the whole life of a process; `start` and `stop` are for programs that
    have their own. out: where the start message goes."""

    def __init__(self, settings: Settings, *, out: TextIO | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self._recoveries = Recoveries(self.metrics, settings.drift_corpus)
        self.state = ServerState()
        self.address = Address()
        self._out = out or sys.stdout
        self._router = Router(
            api_keys=config.keys_of(settings),
            cors_origins=settings.cors_origin,
            allow_hosts=settings.allow_host,
        )
        handlers.register(
            self._router,
            self.state,
            self.metrics,
            heartbeat_s=settings.heartbeat_s,
            version=__version__,
            messages_thinking=DefaultThinking(settings.messages_default_thinking),
        )
        self._server = HttpServer(
            self._router, http_limits(settings), self.metrics, log.get("http")
        )
        self._watchdog = Watchdog(settings.watchdog_loop_s, settings.watchdog_wave_s, self._stalled)
        self._trips = self.metrics.counter("watchdog_trips_total", "Stalls of the engine seen")
        self.engine: Engine | None = None
        self._disk_thread: DiskThread | None = None
        self._service: Service | None = None
        self._end: asyncio.Future[int] | None = None

    @property
    def url(self) -> str:
        """Base address of the API; valid once listening."""
        return self.address.url + ("" if self.address.uds else "/v1")

    # ------------------------------------------------------------ life

    async def run(self) -> int:
        """Serve until a signal or a fatal fault; returns the exit status. Raises UsageError when
        the socket or the model cannot be had."""
        self._install_signals()
        await self.listen()
        ended = self._ending()
        loading = asyncio.ensure_future(self.load())
        first: list[asyncio.Future[Any]] = [loading, ended]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            try:
                loading.result()
            except BaseException:
                await self._server.close()
                self._watchdog.stop()
                raise
        elif not loading.done():
            # The thread that loads cannot be stopped and owns all there is.
            _log.info("stopped while loading")
            loading.cancel()
            await self._server.close()
            os._exit(ended.result())
        status = await ended
        if status == EXIT_OK:
            return await self.stop()
        await self._give_up()
        return status

    async def start(self) -> str:
        """Listen and load; returns the URL."""
        await self.listen()
        try:
            await self.load()
        except BaseException:
            await self._server.close()
            self._watchdog.stop()
            raise
        return self.url

    async def listen(self) -> None:
        """Open the socket; everything but health checks answers 503 until `load` is done."""
        self._ending()
        settings = self.settings
        self.address = await self._server.start(settings.host, settings.port, settings.uds)
        self._say(
            f"kslserve {__version__}: loading {settings.model}, listening on {self.address.url}"
        )
        self._watchdog.start()

    async def load(self) -> None:
        """Open model and engine, and become ready."""
        settings = self.settings
        try:
            backend = await in_thread(
                lambda: open_backend(settings, lambda line: _log.info(line)), "load"
            )
        except EngineError as error:
            raise UsageError(f"{settings.model} cannot be served: {error}") from error
        except MemoryError as error:
            raise UsageError(f"there is not enough memory for {settings.model}.") from error
        self._compose(backend)
        for line in (*backend.lines, f"ready     {self.url}"):
            self._say(line)

    def _compose(self, backend: Backend) -> None:
        settings = self.settings
        self.engine = backend.engine
        scheduler = Scheduler(
            backend.engine,
            sched_limits(settings, backend),
            self.metrics,
            on_fatal=self._fatal,
        )
        echo = EchoTable()
        for turn, context in backend.kept:
            echo.record(turn, context)
        if backend.disk is not None and backend.scan is not None and backend.turns is not None:
            self._disk_thread = DiskThread()
            room = settings.prefix_cache_disk_bytes - 2 * backend.turns.max_bytes
            scheduler.use_disk(Disk(backend.disk, self._disk_thread, room), backend.scan)
            echo.on_record = partial(_keep_turn, self._disk_thread, backend.turns)
        scheduler.start()
        self._service = self.state.service = Service(
            backend.model,
            backend.tokenizer,
            Preparer(
                backend.tokenizer,
                backend.template,
                scheduler.window,
                preserve=settings.preserve_thinking,
                queue_max=settings.max_requests,
                echo=echo,
            ),
            scheduler,
            self.metrics,
            grammars=backend.grammars,
            recoveries=self._recoveries,
            recover=settings.recover_calls,
            test_hooks=settings.test_hooks,
        )
        self._watchdog.watch(backend.engine.progress)
        # What lives as long as the process need not be looked at by every collection.
        gc.collect()
        gc.freeze()
        self.state.phase = Phase.READY

    async def stop(self) -> int:
        """Stop in order; returns the exit status."""
        settings = self.settings
        self.state.phase = Phase.DRAINING
        _log.info("stopping", grace_s=settings.grace_s)
        await self._server.stop_accepting()
        service = self._service
        if service is not None:
            try:
                await asyncio.wait_for(
                    service.scheduler.drain(settings.grace_s), settings.grace_s + _STOP_SLACK_S
                )
            except TimeoutError:
                _log.error("the engine does not finish; giving up on it")
                await self._give_up()
                return EXIT_FATAL
        await self._server.close(_FLUSH_S)
        if service is not None:
            service.close()
            await service.scheduler.flush(_CACHE_FLUSH_S)
            service.scheduler.close()
        if self._disk_thread is not None:
            await self._disk_thread.settle(_FLUSH_S)
            self._disk_thread.close()
        if self.engine is not None:
            self.engine.close()
        self._watchdog.stop()
        _log.info("stopped")
        return EXIT_OK

    # ------------------------------------------------------------ ends

    async def _give_up(self) -> None:
        """Tell whoever still waits, and close; the engine is left as it is."""
        if self._service is not None:
            self._service.scheduler.close()
        await self._server.close(_ABORT_S)

    def _ending(self) -> asyncio.Future[int]:
        """Resolves to the exit status when the server has to end."""
        if self._end is None:
            self._end = asyncio.get_running_loop().create_future()
        return self._end

    def _end_with(self, status: int) -> None:
        if not self._ending().done():
            self._ending().set_result(status)

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: int) -> None:
        """The first signal ends in order, the second one at once."""
        if self._ending().done():
            os._exit(128 + number)
        _log.info("signal", number=int(number))
        self._end_with(EXIT_OK)

    def _fatal(self, text: str) -> None:
        """The engine is poisoned: the scheduler has ended everything that lived."""
        _log.error("the engine has failed", error=text)
        self.state.phase = Phase.FAILED
        self._end_with(EXIT_FATAL)

    def _stalled(self, text: str) -> None:
        self._trips.inc()
        self.state.stalled = True
        _log.error("watchdog", error=text)
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback(sys.__stderr__)
        self._end_with(EXIT_FATAL)

    def _say(self, line: str) -> None:
        try:
            print(line, file=self._out, flush=True)
        except OSError:
            _log.debug("the start message found no reader")


def new_loop() -> asyncio.AbstractEventLoop:
    """A uvloop where there is one, else the platform's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _keep_turn(thread: DiskThread, turns: TurnStore, turn: Turn, context: bytes) -> None:
    """Write a generated turn beside the checkpoints."""

    def written(result: Any, error: Exception | None) -> None:
        if error is not None:
            _log.warning("a generated turn could not be written", error=repr(error))

    thread.run(lambda: turns.append(turn, context), written)
