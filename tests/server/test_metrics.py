"""/metrics: names, kinds and sums, and what usage says about the prefix cache."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import Server, get_text, script_settings, serving

LINE = re.compile(r'(kslserve_[a-z_]+)(\{[a-z]+="[^"\n]*"\})? (-?[0-9.e+-]+|\+Inf)')
STATES = ("completed", "cancelled", "failed", "rejected")
NAMES = [
    "engine_up",
    "engine_busy",
    'engine_phase{phase="ready"}',
    "process_start_time_seconds",
    'requests_total{state="submitted"}',
    'requests_total{state="completed"}',
    'requests_total{state="cancelled"}',
    'requests_total{state="failed"}',
    'requests_total{state="rejected"}',
    "request_duration_seconds_sum",
    "request_duration_seconds_count",
    "queue_duration_seconds_sum",
    "queue_duration_seconds_count",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "inter_token_seconds_sum",
    "inter_token_seconds_count",
    "wave_seconds_sum",
    "wave_seconds_count",
    'requests{state="queued"}',
    'requests{state="prefilling"}',
    'requests{state="decoding"}',
    'kv_blocks{state="free"}',
    'kv_blocks{state="total"}',
    'tokens_total{kind="prompt"}',
    'tokens_total{kind="generated"}',
    'scheduler_events_total{kind="queue_timeout"}',
    'scheduler_events_total{kind="request_timeout"}',
    'scheduler_events_total{kind="admission_recovery"}',
    'scheduler_events_total{kind="admission_failure"}',
    'scheduler_events_total{kind="native_failure"}',
    'prefix_cache_events_total{kind="hit"}',
    'prefix_cache_events_total{kind="miss"}',
    'prefix_cache_events_total{kind="build"}',
    "prefix_cache_tokens_saved_total",
    'speculative_tokens_total{kind="drafted"}',
    'speculative_tokens_total{kind="committed"}',
    "speculative_rounds_total",
    "graphs",
    "graph_kernels",
    "graphs_made_total",
    'prefix_cache_checkpoints{tier="device"}',
    'prefix_cache_checkpoints{tier="host"}',
    'prefix_cache_checkpoints{tier="disk"}',
    'prefix_cache_bytes{tier="host"}',
    'prefix_cache_bytes{tier="disk"}',
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    output = {"chunks": ["well ", "done"], "end": "stop", "thinking": False}
    with serving(script_settings(tmp_path, [output], context=4096, max_seqs=2)) as running:
        yield running


def post(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        server.url.removesuffix("/v1") + path,
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return json.loads(error.read())


def test_every_name_is_there_and_the_text_is_well_formed(server: Server) -> None:
    chat = {"model": "any", "messages": [{"role": "user", "content": "Go on. " * 40}]}
    assert "choices" in post(server, "/v1/chat/completions", chat)
    assert "error" in post(server, "/v1/chat/completions", {**chat, "temperature": "hot"})
    text = get_text(server.root + "/metrics")
    assert text.endswith("\n")
    typed: dict[str, str] = {}
    seen = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            typed[name] = kind
        elif not line.startswith("# HELP "):
            match = LINE.fullmatch(line)
            assert match, line
            base = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert match[1] in typed or typed.get(base) == "histogram", line
            seen.add(match[1].removeprefix("kslserve_") + (match[2] or ""))
    assert set(NAMES) <= seen
    for name in ("time_to_first_token", "queue_duration", "inter_token", "wave"):
        assert typed[f"kslserve_{name}_seconds"] == "histogram"
    count = {state: server.metric(f'requests_total{{state="{state}"}}') for state in STATES}
    assert count == {"completed": 1, "cancelled": 0, "failed": 0, "rejected": 1}
    assert server.metric('requests_total{state="submitted"}') == sum(count.values())
    assert server.metric("time_to_first_token_seconds_count") == 1
    assert server.metric("engine_up") == 1
    assert server.metric("engine_busy") == 0


def test_what_is_submitted_has_one_state_or_runs(tmp_path: Path) -> None:
    slow = {"chunks": ["tick "] * 400, "end": "stop", "thinking": False, "delay_ms": 5}
    with serving(script_settings(tmp_path, [slow], context=4096)) as server:
        body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Go."}]}
        request = urllib.request.Request(
            server.url + "/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )

        def counts() -> list[float]:
            names = ("submitted", *STATES)
            return [server.metric(f'requests_total{{state="{state}"}}') for state in names]

        with urllib.request.urlopen(request, timeout=20) as response:
            for _ in range(3):  # the first event is there before the first token
                response.readline()
            assert counts() == [1, 0, 0, 0, 0]
            in_flight = [server.metric(f'requests{{state="{s}"}}') for s in ("queued", "decoding")]
            assert in_flight == [0, 1]
        until = time.monotonic() + 20
        while counts()[2] != 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert counts() == [1, 0, 1, 0, 0]


def test_usage_tells_what_was_written_to_the_cache(server: Server) -> None:
    text = "Remember this. " * 30
    messages = {
        "model": "any",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": text}],
    }
    first = post(server, "/v1/messages", messages)["usage"]
    prompt = first["cache_creation_input_tokens"]
    assert first["input_tokens"] == first["cache_read_input_tokens"] == 0
    assert prompt > 30
    again = post(server, "/v1/messages", messages)["usage"]
    read = again["cache_read_input_tokens"]
    assert 0 < read < prompt
    # The same state is kept already: nothing new is written.
    assert again["cache_creation_input_tokens"] == 0
    assert again["input_tokens"] == prompt - read
    responses = {"model": "any", "input": "Another one. " * 30}
    usage = post(server, "/v1/responses", responses)["usage"]
    details = usage["input_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == usage["input_tokens"]
    assert details["cache_write_tokens"] > 30
