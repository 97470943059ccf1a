"""A conversation goes on after the server was stopped and started again: all of it is found on
disk, what the model generated included, whatever its client leaves out of the echo."""

from __future__ import annotations

import contextlib
import json
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.server.conversations import DIALECTS, Call, Turn, ask
from tests.server.serving import Process, get_text

LIMIT_S = 60
SLACK = 16  # tokens of a block boundary and of the turn's end
SYSTEM = "You are a careful assistant who works on a small project. " * 25
TOOL = {
    "type": "function",
    "function": {
        "name": "read_file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


@contextlib.contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Process]:
    """A server with a disk tier, stopped in order at the end."""
    server = Process(
        "--prefix-cache-dir", str(folder), "--context", "4096", "--test-hooks",
        "--log-level", "warning", *flags,
    )  # fmt: skip
    try:
        server.wait_ready()
        yield server
        server.process.send_signal(signal.SIGTERM)
        status, _, errors = server.finish()
        assert status == 0, errors
    finally:
        server.kill()


def test_the_whole_conversation_matches_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    chat = DIALECTS["chat"]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is in notes.txt?"},
    ]
    body = {"model": "any", "messages": messages, "tools": [TOOL], "temperature": 0}
    said = Turn("I will look.", "The file has to be read.", [Call("", "read_file", {"path": "n"})])
    with serving(folder) as server:
        first = ask(server.url, chat, body, said)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert first.calls[0].name == "read_file"

    # The client echoes text and call, and neither the reasoning nor the spelling.
    call = first.calls[0]
    function = {"name": call.name, "arguments": '{"path": "n"}'}
    messages += [
        {
            "role": "assistant",
            "content": first.text,
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "Buy milk."},
    ]
    with serving(folder) as server:
        second = ask(server.url, chat, body, Turn("It says:  buy milk.", "Simple."))
    assert second.cached >= first.whole - SLACK

    messages += [
        {"role": "assistant", "content": second.text},
        {"role": "user", "content": "Thanks. And what else?"},
    ]
    # Without drafts there is no MTP head; the trunk's state is the same.
    with serving(folder, "--speculation", "off") as server:
        third = ask(server.url, chat, body, Turn("Nothing.", "Nothing else."))
    assert third.cached >= second.whole - SLACK


def test_a_conversation_that_was_left_alone_leaves_memory_and_goes_on(tmp_path: Path) -> None:
    chat = DIALECTS["chat"]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is in notes.txt?"},
    ]
    body = {"model": "any", "messages": messages, "temperature": 0}
    with serving(tmp_path / "cache", "--idle-return-s", "0.1") as server:
        root = server.url.removesuffix("/v1")
        first = ask(server.url, chat, body, Turn("I will look. " * 100, "The file has to be read."))

        def health() -> dict[str, Any]:
            return json.loads(get_text(root + "/healthz"))["scheduler"]  # type: ignore[no-any-return]

        until = time.monotonic() + LIMIT_S
        while health()["cache"]["device"] and time.monotonic() < until:
            time.sleep(0.05)
        now = health()
        assert (now["cache"]["device"], now["blocks_cached"]) == (0, 0)
        assert now["cache"]["disk"] >= 1
        messages += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Thanks. And what else?"},
        ]
        second = ask(server.url, chat, body, Turn("Nothing.", "Nothing else."))
        assert health()["cache"]["reads"] >= 1
    assert second.cached >= first.whole - SLACK
