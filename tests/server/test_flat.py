"""Conversations that come again and again, more of them than the pools hold: nothing is held that
was free before, and memory does not grow."""

from __future__ import annotations

import gc
import http.client
import json
import time
import tracemalloc
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kslserve.api.exchange import Exchange
from kslserve.config import Settings
from kslserve.sched.sequence import Sequence
from kslserve.service.completion import Completion
from kslserve.service.generation import Generation
from tests.resident import resident
from tests.server.serving import Server, serving

CONVERSATIONS, TURNS = 4, 3
WARM_UP, ROUNDS = 2, 4
FREE = ("slots_free", "blocks_free", "running", "queued")
# Over all rounds. Objects: a fraction of what a request is, for each. Memory: a huge page or two;
# images, which are counted, are not in it.
OBJECTS, RESIDENT = 600 * ROUNDS * (CONVERSATIONS * TURNS + 1), 4 << 20

COMPLETION = json.dumps({"model": "m", "prompt": ["What is left", "of it"], "echo": True}).encode()


def body_of(messages: list[dict[str, str]], **more: Any) -> bytes:
    sampling = {"max_tokens": 5, "temperature": 0, "enable_thinking": False}
    return json.dumps({"model": "m", "messages": messages, **sampling, **more}).encode()


def ask(server: Server, messages: list[dict[str, str]]) -> str:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + "/chat/completions", body_of(messages), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def hang_up(server: Server, messages: list[dict[str, str]]) -> None:
    """Leave a stream after its first bytes."""
    connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=60)
    body = body_of(messages, stream=True, max_tokens=200, ignore_eos=True)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    assert connection.getresponse().read(1)
    connection.close()
    service = server.app.state.service
    assert service is not None
    deadline = time.monotonic() + 30
    while service.live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.live == 0


def play(server: Server, rounds: int) -> None:
    for _ in range(rounds):
        for number in range(CONVERSATIONS):
            messages = [{"role": "system", "content": f"Number {number}. " * 100}]
            for turn in range(TURNS):
                messages.append({"role": "user", "content": f"And {number} times {turn}? " * 6})
                messages.append({"role": "assistant", "content": ask(server, messages)})
        hang_up(server, messages[:-1])


def objects() -> int:
    """Bytes of Python's objects, without the data of arrays."""
    gc.collect()
    arrays = tracemalloc.DomainFilter(inclusive=False, domain=np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces)


def counts(server: Server) -> dict[str, Any]:
    with urllib.request.urlopen(server.root + "/healthz", timeout=10) as response:
        found: dict[str, Any] = json.load(response)["scheduler"]
    return found


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_nothing_is_held_and_memory_is_flat(tmp_path: Path) -> None:
    settings = Settings(
        context=1024, kv_tokens=1536, max_seqs=2, prefix_cache_slabs=3, log_level="warning",
        prefix_cache_host_bytes=8 << 20, prefix_cache_dir=str(tmp_path / "disk"),
        prefix_cache_disk_bytes=48 << 20,
    )  # fmt: skip
    with serving(settings) as server:
        before = counts(server)
        tracemalloc.start()
        try:
            play(server, WARM_UP)
            first, before_objects = counts(server), objects()
            memory = resident() - first["cache"]["image_bytes"]
            play(server, ROUNDS)
            grown = objects() - before_objects
            after = counts(server)
            resident_grown = resident() - after["cache"]["image_bytes"] - memory
        finally:
            tracemalloc.stop()
    print(f"objects {grown}, memory {resident_grown}, {after['cache']}")
    assert {name: after[name] for name in FREE} == {name: before[name] for name in FREE}
    assert after["cache"]["evictions"] > first["cache"]["evictions"], "the pools were never full"
    assert after["cache"]["writes"] > first["cache"]["writes"], "the disk tier was never used"
    assert after["cache"]["host_bytes"] <= 8 << 20
    assert after["cache"]["disk_bytes"] <= 48 << 20
    assert grown < OBJECTS
    assert resident_grown < RESIDENT


def test_what_has_ended_is_freed_at_once() -> None:
    """Without a collector of cycles: prompts, drafters and texts of requests take MiB."""
    kinds = (Sequence, Generation, Completion, Exchange)
    settings = Settings(context=1024, max_seqs=2, log_level="warning")
    with serving(settings) as server:
        gc.collect()
        gc.disable()
        try:
            messages = [{"role": "user", "content": "What is left of it? " * 20}]
            ask(server, messages)
            hang_up(server, messages)
            body = body_of(messages, stream=True, tools=[], stop=["e"])
            for path, data in (("/chat/completions", body), ("/completions", COMPLETION)):
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(server.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=60) as response:
                    response.read()
            deadline = time.monotonic() + 10
            while (left := living(kinds)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert left == []
        finally:
            gc.enable()


def living(kinds: tuple[type, ...]) -> list[str]:
    return [type(item).__name__ for item in gc.get_objects() if type(item) in kinds]
