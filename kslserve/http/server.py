"""Listening sockets and the set of connections: start, stop accepting, close.

Stop order: `stop_accepting` closes the sockets and the idle connections and lets the others finish
their response; `close` waits for those, then cuts what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from kslserve.errors import UsageError
from kslserve.http.flow import HttpLimits
from kslserve.http.protocol import Connection
from kslserve.http.router import Router
from kslserve.http.shared import Shared
from kslserve.log import Logger
from kslserve.metrics import Metrics

__all__ = ["Address", "HttpLimits", "HttpServer"]

BACKLOG = 256
PORT_TRIES = 8  # for a free port that all addresses of a name have
ACCEPT_TURNS = 4  # of the loop, between accepting a socket and `connection_made`
CANCEL_S = 1.0  # how long cut handlers may take to end


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    uds: str = ""

    @property
    def url(self) -> str:
        if self.uds:
            return f"unix:{self.uds}"
        return (
            f"http://[{self.host}]:{self.port}"
            if ":" in self.host
            else f"http://{self.host}:{self.port}"
        )


class HttpServer:
    """One listener. `start` may be called once."""

    def __init__(self, router: Router, limits: HttpLimits, metrics: Metrics, log: Logger) -> None:
        self._router = router
        self._limits = limits
        self._log = log
        self._gauge = metrics.gauge("connections_open", "Open client connections")
        self._shared: Shared | None = None
        self._servers: list[asyncio.Server] = []
        self._uds: tuple[str, int] | None = None  # path and inode of our socket file

    async def start(self, host: str = "127.0.0.1", port: int = 0, uds: str = "") -> Address:
        """Listen on every address of `host`, or on the Unix socket `uds` when it is not empty. Port
        0 picks a free one. Raises UsageError when that is not possible."""
        loop = asyncio.get_running_loop()
        shared = Shared(self._router, self._limits, self._log, loop, self._gauge)
        self._shared = shared
        if uds:
            sockets = [_bind_unix(uds)]
            self._uds = (uds, os.stat(uds).st_ino)
            address = Address(uds=uds)
        else:
            sockets = await _bind_tcp(loop, host, port)
            address = Address(host, sockets[0].getsockname()[1])
            self._router.allow_host(host)

        def connect() -> Connection:
            return Connection(shared)

        for sock in sockets:
            if uds:
                server = await loop.create_unix_server(connect, sock=sock, backlog=BACKLOG)
            else:
                server = await loop.create_server(connect, sock=sock, backlog=BACKLOG)
            self._servers.append(server)
        return address

    @property
    def open_connections(self) -> int:
        return len(self._shared.connections) if self._shared is not None else 0

    async def stop_accepting(self) -> None:
        """Close the listening sockets and idle connections; other connections close with the
        response that they are at."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        self._remove_socket_file()
        if self._shared is not None:
            self._shared.draining = True
            # Connections that were accepted in this turn of the loop are not in the set yet.
            for _ in range(ACCEPT_TURNS):
                await asyncio.sleep(0)
            for connection in list(self._shared.connections):
                connection.close_idle()

    async def close(self, grace_s: float = 0.0) -> None:
        """Stop accepting, wait up to `grace_s` for open responses, then cut connections and
        handlers."""
        await self.stop_accepting()
        shared = self._shared
        if shared is None:
            return
        await _until_empty(shared, grace_s)
        for connection in list(shared.connections):
            connection.abort()
        # Handlers learn of it by `on_close` and end by themselves; one that does not is cancelled.
        await _until_empty(shared, CANCEL_S)
        for task in list(shared.tasks):
            task.cancel()
        await asyncio.gather(*shared.tasks, return_exceptions=True)

    def _remove_socket_file(self) -> None:
        if self._uds is None:
            return
        (path, inode), self._uds = self._uds, None
        # Another server may have taken the path meanwhile.
        with contextlib.suppress(OSError):
            if os.stat(path).st_ino == inode:
                os.unlink(path)


async def _until_empty(shared: Shared, limit_s: float) -> None:
    """Wait until no connection and no handler is left, `limit_s` at most."""
    loop = asyncio.get_running_loop()
    end = loop.time() + limit_s
    pause_s = 0.001
    while (shared.connections or shared.tasks) and loop.time() < end:
        await asyncio.sleep(pause_s)
        pause_s = min(0.05, pause_s * 2)


async def _bind_tcp(loop: asyncio.AbstractEventLoop, host: str, port: int) -> list[socket.socket]:
    """One bound socket per address of `host`, all on one port."""
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(f"cannot find the address of host {host!r}: {error}.") from error
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in found))
    for attempt in range(PORT_TRIES):
        sockets: list[socket.socket] = []
        try:
            return _bind_all(addresses, port, sockets)
        except OSError as error:
            for sock in sockets:
                sock.close()
            if port == 0 and error.errno == errno.EADDRINUSE and attempt + 1 < PORT_TRIES:
                continue
            raise UsageError(_bind_trouble(host, port, error)) from error
    raise AssertionError("unreachable")


def _bind_all(
    addresses: Sequence[tuple[int, tuple]], port: int, sockets: list[socket.socket]
) -> list[socket.socket]:
    """Bind one socket after another into `sockets`. Addresses of a family that the machine lacks
    are left out as long as one remains."""
    missing: OSError | None = None
    for family, address in addresses:
        try:
            # Named, since the standard loop sets TCP_NODELAY only where the protocol is.
            sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        except OSError as error:
            missing = error
            continue
        sockets.append(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind((address[0], port, *address[2:]))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            missing = error
            sockets.pop().close()
            continue
        port = sock.getsockname()[1]
    if not sockets:
        raise missing or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return sockets


def _bind_trouble(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop the other server or choose another --port."
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs more rights; choose a --port of 1024 or more."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine."
    return f"cannot listen on port {port} of {host}: {error.strerror or error}."


def _bind_unix(path: str) -> socket.socket:
    """A bound Unix socket. A file left by a server that is gone is replaced, anything else is
    not."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen on --uds {path}: {error.strerror or error}.") from error
    except UsageError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _remove_stale(path: str) -> None:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"--uds {path} exists and is not a socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise UsageError(f"--uds {path} is in use by another server.")
