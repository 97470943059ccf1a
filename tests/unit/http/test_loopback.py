"""The HTTP layer on real sockets, on both event loops: the literal exchanges, listening,
half-closed and closed clients, slow readers, stopping."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from kslserve import log
from kslserve.errors import UsageError
from kslserve.http.server import Address, HttpLimits, HttpServer

from .exchanges import EXCHANGES, Exchange
from .harness import Server, plain

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
GET = b"GET /hello HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAIT = b"POST /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"
LIMIT_S = 20.0  # only a broken server comes near it

Body = Callable[[], Awaitable[None]]


@pytest.fixture(params=LOOPS)
def on_loop(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Runs an async function on one kind of loop."""

    def run(body: Body) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LIMIT_S):
                await body()

        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(limited())

    return run


@contextlib.asynccontextmanager
async def listening(
    limits: HttpLimits | None = None, **start: object
) -> AsyncIterator[tuple[Server, HttpServer, Address]]:
    toy = Server()
    server = HttpServer(toy.router, limits or HttpLimits(), toy.metrics, log.get("test"))
    address = await server.start(**start)  # type: ignore[arg-type]
    try:
        yield toy, server, address
    finally:
        await server.close()
    assert server.open_connections == 0


class Client:
    """A socket, driven without blocking the loop."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.setblocking(False)
        self.got = b""

    @classmethod
    async def connect(cls, address: Address) -> Client:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        client = cls(socket.socket(socket.AF_UNIX if address.uds else family))
        target = address.uds or (address.host, address.port)
        try:
            await asyncio.get_running_loop().sock_connect(client.socket, target)
        except OSError:
            client.socket.close()
            raise
        return client

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def until(self, enough: Callable[[bytes], bool]) -> bool:
        """Read until `enough`; False when the server ended before."""
        while not enough(self.got):
            data = await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
            if not data:
                return False
            self.got += data
        return True

    async def ends(self) -> bytes:
        await self.until(lambda _: False)
        return self.got

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()


async def eventually(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - whatever the condition
        await asyncio.sleep(0.001)


def test_exchanges(on_loop: Callable[[Body], None]) -> None:
    async def one(address: Address, exchange: Exchange) -> None:
        with await Client.connect(address) as client:
            await client.send(exchange.sent)
            if exchange.closed:
                got = await client.ends()
            else:
                assert await client.until(lambda got: len(plain(got)) >= len(exchange.got))
                got = client.got
            assert plain(got) == exchange.got, exchange.name

    async def body() -> None:
        async with listening() as (_, _, address):
            for exchange in EXCHANGES:
                await one(address, exchange)

    on_loop(body)


def test_half_closed_client_gets_its_answer(on_loop: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with listening() as (toy, _, address):
            with await Client.connect(address) as client:
                await client.send(WAIT)
                client.socket.shutdown(socket.SHUT_WR)
                assert await client.until(lambda got: b" 100 Continue\r\n\r\n" in got)
                await asyncio.sleep(0.05)  # time for the first looks at the peer
                toy.go.set()
                assert (await client.ends()).endswith(b"\r\n\r\ndone")
            assert toy.events == ["start", "end"]

    on_loop(body)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_client_that_leaves_is_noticed(
    how: str, kind: str, on_loop: Callable[[Body], None], tmp_path: Path
) -> None:
    async def body() -> None:
        where = {"uds": str(tmp_path / "s")} if kind == "unix" else {}
        async with listening(**where) as (toy, server, address):
            with await Client.connect(address) as client:
                await client.send(WAIT)
                await eventually(lambda: toy.events == ["start"])
                if how == "reset" and kind == "tcp":
                    linger = struct.pack("ii", 1, 0)
                    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await eventually(lambda: toy.events == ["start", "gone", "end"])
            await eventually(lambda: server.open_connections == 0)

    on_loop(body)


def test_client_that_leaves_a_stream_is_noticed(on_loop: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with listening() as (toy, _, address):
            with await Client.connect(address) as client:
                await client.send(WAIT.replace(b"/wait", b"/wait_stream"))
                assert await client.until(lambda got: b"\r\n\r\n" in got)
            await eventually(lambda: toy.events == ["gone", "end"])
            assert toy.replies[0].lost

    on_loop(body)


def test_slow_reader_is_cut(on_loop: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with listening(HttpLimits(write_timeout_s=0.05)) as (toy, server, address):
            with await Client.connect(address) as client:
                await client.send(WAIT.replace(b"/wait", b"/wait_stream"))
                await eventually(lambda: bool(toy.replies))
                (reply,) = toy.replies
                while not reply.paused:
                    reply.write(b"x" * 65536)
                    await asyncio.sleep(0)
                await eventually(lambda: reply.lost)
                await eventually(lambda: server.open_connections == 0)

    on_loop(body)


def test_large_body_and_answer(on_loop: Callable[[Body], None]) -> None:
    async def body() -> None:
        data = bytes(range(256)) * 16384
        head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data)
        async with listening() as (_, _, address):
            with await Client.connect(address) as client:
                await client.send(head)
                sending = asyncio.create_task(client.send(data))
                assert await client.until(lambda got: got.endswith(data[-1000:]))
                await sending
                assert client.got.partition(b"\r\n\r\n")[2] == data

    on_loop(body)


def test_refused_upload_gets_its_answer(on_loop: Callable[[Body], None]) -> None:
    """The client sends all of its body before it reads; the refusal is still there."""

    async def body() -> None:
        async with listening(HttpLimits(body_bytes=1000)) as (_, _, address):
            with await Client.connect(address) as client:
                head = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4000000\r\n\r\n"
                await client.send(head + b"x" * 4000000)
                assert (await client.ends()).startswith(b"HTTP/1.1 413 ")

    on_loop(body)


def test_addresses(on_loop: Callable[[Body], None], tmp_path: Path) -> None:
    async def body() -> None:
        path = tmp_path / "socket"
        for start, url in (
            ({"host": "127.0.0.1"}, "http://127.0.0.1:"),
            ({"host": "localhost"}, "http://localhost:"),
            ({"uds": str(path)}, f"unix:{path}"),
        ):
            async with listening(**start) as (_, _, address):
                assert address.url.startswith(url)
                if address.host == "localhost":
                    address = Address("127.0.0.1", address.port)
                with await Client.connect(address) as client:
                    await client.send(GET)
                    assert await client.until(lambda got: got.endswith(b"hello"))

    on_loop(body)
    assert not (tmp_path / "socket").exists()


def test_ipv6(on_loop: Callable[[Body], None]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")

    async def body() -> None:
        async with listening(host="::1") as (_, _, address):
            assert address.url == f"http://[::1]:{address.port}"
            with await Client.connect(address) as client:
                await client.send(GET.replace(b"localhost", b"[::1]:80"))
                assert await client.until(lambda got: got.endswith(b"hello"))

    on_loop(body)


def test_no_delay_is_set(on_loop: Callable[[Body], None]) -> None:
    async def body() -> None:
        async with listening() as (_, server, address):
            with await Client.connect(address) as client:
                await client.send(GET)
                assert await client.until(lambda got: got.endswith(b"hello"))
                assert server._shared is not None
                (connection,) = server._shared.connections
                sock = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0

    on_loop(body)


def test_address_in_use(on_loop: Callable[[Body], None], tmp_path: Path) -> None:
    async def body() -> None:
        async with listening(host="127.0.0.1") as (_, _, address):
            with pytest.raises(UsageError, match=f"port {address.port} on 127.0.0.1 is in use"):
                async with listening(host="127.0.0.1", port=address.port):
                    pass
        async with listening(uds=str(tmp_path / "s")):
            with pytest.raises(UsageError, match="in use by another server"):
                async with listening(uds=str(tmp_path / "s")):
                    pass

    on_loop(body)


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ({"host": "no-such-host.invalid"}, "cannot find the address"),
        ({"host": "a" * 70 + ".example"}, "cannot find the address"),
        ({"host": "192.0.2.1"}, "is not an address of this machine"),
        ({"uds": "/no/such/folder/socket"}, "cannot listen on --uds"),
        ({"uds": "/tmp/" + "a" * 200}, "cannot listen on --uds"),
    ],
)
async def test_bad_addresses(start: dict[str, str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        async with listening(**start):
            pass


async def test_socket_files(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("a file")
    with pytest.raises(UsageError, match="is not a socket"):
        async with listening(uds=str(path)):
            pass
    assert path.read_text() == "a file"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with listening(uds=str(path)):  # replaces the stale one
        path.unlink()
        path.write_text("somebody else's")
    assert path.exists()


def test_stop(on_loop: Callable[[Body], None]) -> None:
    """Idle connections close at once, the others after their response, the rest is cut."""

    async def body() -> None:
        async with listening() as (toy, server, address):
            with (
                await Client.connect(address) as idle,
                await Client.connect(address) as busy,
                await Client.connect(address) as stuck,
            ):
                await idle.send(GET)
                assert await idle.until(lambda got: got.endswith(b"hello"))
                await busy.send(WAIT)
                await stuck.send(WAIT.replace(b"/wait", b"/wait_stream"))
                await eventually(lambda: bool(toy.events and toy.replies))
                await server.stop_accepting()
                await idle.ends()
                with pytest.raises(OSError):
                    await Client.connect(address)
                toy.go.set()
                assert b"connection: close\r\n" in await busy.ends()
                with contextlib.suppress(ConnectionResetError):
                    await stuck.until(lambda got: b"\r\n\r\n" in got)
                await server.close(grace_s=0.02)
                assert toy.events[-2:] == ["gone", "end"]
                with contextlib.suppress(ConnectionResetError):
                    assert not (await stuck.ends()).endswith(b"\r\n0\r\n\r\n")

    on_loop(body)


def test_stop_cancels_a_handler_that_does_not_end(
    on_loop: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kslserve.http.server.CANCEL_S", 0.02)

    async def body() -> None:
        ended: list[str] = []

        async def endless(request: object, reply: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

        async with listening() as (toy, server, address):
            toy.router.add("GET", "/endless", endless)
            with await Client.connect(address) as client:
                await client.send(GET.replace(b"hello", b"endless"))
                await eventually(lambda: bool(server._shared and server._shared.tasks))
                await server.close()
        assert ended == ["cancelled"]

    on_loop(body)


async def test_close_before_start() -> None:
    toy = Server()
    server = HttpServer(toy.router, HttpLimits(), toy.metrics, log.get("test"))
    await server.close()
    assert server.open_connections == 0
