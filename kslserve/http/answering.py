"""The side of a connection that answers: the one reply that is open, its bytes, and whether its
client is still there.

Replies write here (message.Outlet); the connection opens them, and hears when they are over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kslserve.http.flow import PeerProbe, WriteFlow
from kslserve.http.message import CONTINUE, Reply, Request
from kslserve.http.shared import Shared


class Answering:
    """on_done: a reply is complete; whether its connection may have another. on_aborted: it ends in
    the middle. on_gone: the client was found to have left."""

    def __init__(
        self,
        shared: Shared,
        on_done: Callable[[bool], None],
        on_aborted: Callable[[], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._shared = shared
        self._on_done = on_done
        self._on_aborted = on_aborted
        self._on_gone = on_gone
        self._transport: asyncio.Transport
        self._out: WriteFlow
        self._probe: PeerProbe | None = None
        self.reply: Reply | None = None
        self.paused = False  # between pause_writing and resume_writing

    def attach(self, transport: asyncio.Transport, out: WriteFlow) -> None:
        self._transport = transport
        self._out = out

    def open(self, request: Request | None, request_id: str, *, keep_alive: bool) -> Reply:
        """The reply to a request, None for one that could not be read. There is one at a time."""
        reply = Reply(self, request, request_id)
        reply.keep_alive = keep_alive
        self.reply = reply
        if request is not None and request.method == "POST":
            self._shared.busy += 1
        return reply

    def pause(self, paused: bool) -> None:
        self.paused = paused
        if self.reply is not None:
            self.reply.paused = paused

    def lose_client(self) -> None:
        """There is nobody to answer any more."""
        reply = self._close()
        if reply is not None:
            self._shared.call(reply.client_lost())

    def start_probe(self) -> bool:
        """After the end of input, find out whether the client is there; False when that cannot
        be."""
        reply = self.reply
        if reply is None or reply.request is None or reply.request.version == "1.0":
            return False
        self.send_bytes(CONTINUE)
        self._probe = PeerProbe(self._shared.loop, self._transport, self._on_gone)
        return True

    def _close(self) -> Reply | None:
        reply, self.reply = self.reply, None
        if reply is not None and reply.request is not None and reply.request.method == "POST":
            self._shared.busy -= 1
        if self._probe is not None:
            self._probe.stop()
            self._probe = None
        return reply

    # What replies use.

    def send_bytes(self, data: bytes) -> None:
        transport = self._transport
        if not transport.is_closing():
            self._out.written += len(data)
            transport.write(data)

    def date_line(self) -> bytes:
        return self._shared.date_line()

    def keeps_alive(self, reply: Reply) -> bool:
        return reply.keep_alive and not self._shared.draining

    def reply_done(self, reply: Reply) -> None:
        self._close()
        self._on_done(reply.keep_alive)

    def reply_aborted(self, reply: Reply) -> None:
        self._close()
        self._on_aborted()
