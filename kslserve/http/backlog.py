"""Bytes that arrived and were not read yet.

While a response is made, what a client sends ahead is held here instead of in the system's buffer,
because reading is what tells that it left; only one that sends more than a bound is paused."""

from __future__ import annotations

import asyncio


class Backlog:
    """data[at:] is unread. bound: unread bytes above which the transport does not read on.
    ended: the client ends its sending side, so nothing more comes."""

    __slots__ = ("_bound", "_paused", "_transport", "at", "data", "ended")

    def __init__(self, bound: int) -> None:
        self.data = b""
        self.at = 0
        self.ended = False
        self._bound = bound
        self._paused = False
        self._transport: asyncio.Transport

    def attach(self, transport: asyncio.Transport) -> None:
        """The transport that the bytes come from."""
        self._transport = transport

    @property
    def held(self) -> int:
        """Unread bytes."""
        return len(self.data) - self.at

    def add(self, data: bytes) -> None:
        self.data = self.data[self.at :] + data if self.at < len(self.data) else data
        self.at = 0

    def clear(self) -> None:
        self.data, self.at = b"", 0

    def balance(self) -> None:
        """After reading: forget what was read, pause or resume the transport."""
        if not self.held:
            self.clear()
        if not self.ended and self._paused != (self.held > self._bound):
            self._paused = not self._paused
            if self._paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def resume(self) -> None:
        """Read on, since whatever comes will be discarded."""
        if self._paused and not self.ended:
            self._transport.resume_reading()
