"""One connection: requests in, replies out, one at a time and in order.

States: idle (no byte of a request), receiving (head or body), answering (a reply is open), ending
(the last response is sent; input is discarded). While answering, further bytes are held (backlog).

End of input. A client that ends its sending side before its request is complete, or once the
response has started, is taken to have left. In between it may be a client that only half-closed (as
`nc -N` does) and gets its answer: an interim `100 Continue`, which every HTTP/1.1 client must
accept, makes the system of one that closed answer with a reset, which is looked for
(flow.PeerProbe). HTTP/1.0 has no interim responses; there the end of input is the end.
"""

from __future__ import annotations

import asyncio
from typing import cast

from kslserve.errors import KslError, RequestTimeout
from kslserve.http.answering import Answering
from kslserve.http.backlog import Backlog
from kslserve.http.flow import Deadline, WriteFlow
from kslserve.http.message import CONTINUE, Handler, Request, Response
from kslserve.http.reader import RequestReader
from kslserve.http.shared import Shared


class Connection(asyncio.Protocol):
    """See the module's text. Made by the server for each accepted socket."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._reader = RequestReader(shared.limits)
        self._deadline = Deadline(shared.loop, self._on_deadline)
        self._answer = Answering(shared, self._on_answered, self._on_cut_answer, self.abort)
        self._transport: asyncio.Transport
        self._out: WriteFlow
        self._peer = ""
        self._local = ""
        self._input = Backlog(shared.limits.backlog_bytes)
        self._verdict: Handler | Response | KslError | None = None
        self._timed_head = False
        self._pumping = False
        self._ending = False

    # Events of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        shared = self._shared
        self._transport = transport
        self._input.attach(transport)
        self._out = WriteFlow(
            shared.loop, transport, shared.limits.write_timeout_s, self._on_stuck_reader
        )
        self._answer.attach(transport, self._out)
        self._peer = _address(transport.get_extra_info("peername"))
        local = transport.get_extra_info("sockname")
        self._local = local[0] if isinstance(local, tuple) else ""
        shared.open_gauge.inc()
        full = len(shared.connections) >= shared.limits.max_connections
        if shared.draining or (full and not shared.evict_idle()):
            shared.log.warning("connection refused", peer=self._peer, open=len(shared.connections))
            self._ending = True
            transport.abort()
        shared.connections[self] = None
        self._deadline.set(shared.limits.idle_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ending = True
        self._shared.connections.pop(self, None)
        self._shared.open_gauge.dec()
        self._deadline.close()
        self._out.close()
        self._input.clear()
        self._reader.reset()
        self._answer.lose_client()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        self._input.add(data)
        self._pump()

    def eof_received(self) -> bool:
        """Whether the transport stays open for writing."""
        self._input.ended = True
        reply = self._answer.reply
        if self._ending:
            return False
        if reply is None:
            # Requests may be waiting for a slow reader of the response before them.
            return self._input.held > 0
        if reply.started or not self._answer.start_probe():
            self._answer.lose_client()
            return False
        return True

    def pause_writing(self) -> None:
        self._answer.pause(True)
        self._out.watch()

    def resume_writing(self) -> None:
        self._answer.pause(False)
        self._out.relax()
        if self._ending:
            self._out.watch()
        elif self._answer.reply is not None:
            self._shared.call(self._answer.reply.drained())
        else:
            self._pump()

    # Receiving.

    def _pump(self) -> None:
        """Read and answer as much of the backlog as can be. A loop and no recursion, since
        responses that need no handler are complete at once."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while (
                self._answer.reply is None
                and self._input.held
                and not self._ending
                and not self._answer.paused
                and not self._transport.is_closing()
            ):
                self._read()
        finally:
            self._pumping = False
        self._settle()

    def _read(self) -> None:
        """Consume the backlog up to the end of one request, and answer it when it is complete."""
        reader, held = self._reader, self._input
        try:
            if reader.request is None:
                held.at = reader.feed_head(held.data, held.at)
                if reader.request is not None:
                    self._on_head(reader.request)
            if reader.request is not None:
                held.at = reader.feed_body(held.data, held.at)
                if reader.complete:
                    self._on_request()
        except KslError as error:
            self._refuse(error)

    def _on_head(self, request: Request) -> None:
        """Decide before the body arrives. A refusal that can wait for the end of the body waits, so
        that the connection stays of use; the body is dropped."""
        shared, reader = self._shared, self._reader
        request.peer = self._peer
        request.local = self._local
        awaits_continue = (
            not reader.complete
            and not self._input.held
            and request.headers.get("expect", "").lower() == "100-continue"
        )
        too_large = reader.length is not None and reader.length > shared.limits.body_bytes
        try:
            self._verdict = shared.judge(request, too_large)
        except KslError as error:
            if too_large or awaits_continue:
                raise
            self._verdict = error
            reader.discard_body = True
        if awaits_continue and request.version == "1.1":
            self._answer.send_bytes(CONTINUE)

    def _on_request(self) -> None:
        """A request is complete: run its handler as a task, or answer what was decided already."""
        shared = self._shared
        request = self._reader.take()
        verdict = self._verdict
        reply = self._answer.open(request, request.request_id, keep_alive=self._reader.keep_alive)
        self._reader.reset()
        self._timed_head = False
        self._verdict = None
        self._deadline.clear()
        if isinstance(verdict, Response):
            reply.respond(verdict)
        elif isinstance(verdict, KslError):
            shared.refuse(reply, verdict, self._peer)
        else:
            assert verdict is not None
            shared.spawn(verdict, request, reply)
            if self._input.ended and not self._answer.start_probe():
                self.abort()

    def _refuse(self, error: KslError) -> None:
        """Answer what cannot be read any further, and end the connection."""
        request = self._reader.request
        request_id = request.request_id if request is not None else self._reader.request_id
        reply = self._answer.open(request, request_id, keep_alive=False)
        self._shared.refuse(reply, error, self._peer)

    def _settle(self) -> None:
        """After reading: the deadline of the state that was reached, and the pause of input."""
        if self._ending or self._transport.is_closing():
            return
        limits = self._shared.limits
        if self._answer.reply is None and not self._input.held:
            if self._input.ended:
                self._end()
                return
            if self._reader.idle:
                self._deadline.set(limits.idle_timeout_s)
            elif self._reader.request is not None:
                self._deadline.set(limits.io_timeout_s)
            elif not self._timed_head:
                self._timed_head = True
                self._deadline.set(limits.io_timeout_s)
        self._input.balance()

    def _on_answered(self, keep_alive: bool) -> None:
        if keep_alive:
            self._pump()
        else:
            self._end()

    def _on_cut_answer(self) -> None:
        self._end(linger=False)

    # Ending.

    def _end(self, *, linger: bool = True) -> None:
        """Close once everything is sent. linger: first only the sending side, and read on for a
        while, because closing with unread input makes the system drop what the client has not read
        yet."""
        self._ending = True
        self._input.clear()
        self._reader.reset()
        if self._transport.is_closing():
            return
        self._input.resume()
        self._out.watch()
        linger = linger and self._shared.limits.linger_s > 0 and not self._input.ended
        if linger and self._transport.can_write_eof():
            self._deadline.set(self._shared.limits.linger_s)
            try:
                self._transport.write_eof()
            except OSError:  # the client is gone already
                self._transport.abort()
        else:
            self._transport.close()

    def _on_deadline(self) -> None:
        if self._ending:
            if self._out.waiting_bytes == 0:
                self._transport.abort()
            else:
                self._deadline.set(self._shared.limits.linger_s)  # the write deadline decides
        elif self._reader.idle:
            self.close_idle()
        else:
            self._refuse(RequestTimeout("The rest of the request did not arrive in time."))

    def _on_stuck_reader(self) -> None:
        self._shared.log.info("slow reader closed", peer=self._peer)
        self.abort()

    @property
    def idle(self) -> bool:
        """Between requests, with none begun."""
        return self._answer.reply is None and self._reader.idle and not self._ending

    def close_idle(self) -> bool:
        """Close if idle."""
        if not self.idle:
            return False
        self._ending = True
        self._transport.close()
        self._out.watch()
        return True

    def abort(self) -> None:
        """Close now, whatever is in progress."""
        self._answer.lose_client()
        self._transport.abort()


def _address(peer: object) -> str:
    if isinstance(peer, tuple) and len(peer) >= 2:
        return f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"
    return ""
