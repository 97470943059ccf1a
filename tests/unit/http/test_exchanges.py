"""The literal exchanges on the mock transport: as one piece, byte by byte, and cut anywhere."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .exchanges import CHUNKED, EXCHANGES, Exchange
from .harness import Server, feed, plain, turns


async def talk(pieces: list[bytes]) -> tuple[bytes, bool]:
    """What the client gets for these pieces, and whether the server ended."""
    server = Server()
    connection, transport = server.connect()
    for piece in pieces:
        feed(connection, transport, piece)
    for _ in range(6):  # a pipelined request starts when the one before is answered
        await turns()
    ended = transport.eof or transport.closing
    if not transport.lost:
        transport.lose()
    await turns()
    assert not server.shared.tasks
    assert not server.shared.connections
    assert server.shared.busy == 0
    assert server.clock.armed == 0
    return plain(transport.sent), ended


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.name)
async def test_whole(exchange: Exchange) -> None:
    assert await talk([exchange.sent]) == (exchange.got, exchange.closed)


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda e: e.name)
async def test_byte_by_byte(exchange: Exchange) -> None:
    pieces = [exchange.sent[i : i + 1] for i in range(len(exchange.sent))]
    assert await talk(pieces) == (exchange.got, exchange.closed)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_cut_anywhere(data: st.DataObject) -> None:
    exchange = data.draw(st.sampled_from(EXCHANGES))
    size = len(exchange.sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=6)))
    pieces = [exchange.sent[a:b] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    expected = (exchange.got, exchange.closed)
    assert asyncio.run(talk([p for p in pieces if p])) == expected


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from(EXCHANGES), max_size=3),
    st.binary(max_size=40),
    st.integers(0, 200),
)
def test_damaged_input_never_breaks_out(start: list[Exchange], junk: bytes, cut: int) -> None:
    """Whatever arrives is answered, refused or waited for; nothing is raised into the loop."""
    sent = b"".join(e.sent for e in start)
    got, _ = asyncio.run(talk([p for p in (sent[:cut], junk, sent[cut:]) if p]))
    assert got == b"" or got.startswith(b"HTTP/1.1 ")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(1, 60), min_size=1, max_size=8), st.data())
def test_chunked_bodies(body: bytes, sizes: list[int], data: st.DataObject) -> None:
    """Any body in any chunks and packets arrives as it was."""
    wire = CHUNKED
    at = count = 0
    while at < len(body):
        part = body[at : at + sizes[count % len(sizes)]]
        wire += b"%x\r\n%b\r\n" % (len(part), part)
        at += len(part)
        count += 1
    wire += b"0\r\n\r\n"
    cut = data.draw(st.integers(0, len(wire)))
    got, ended = asyncio.run(talk([p for p in (wire[:cut], wire[cut:]) if p]))
    assert got.endswith(b"\r\n\r\n" + body)
    assert b"content-length: %d\r\n" % len(body) in got
    assert not ended
