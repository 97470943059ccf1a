"""Drafts behind HTTP: what ends an answer may lie inside a run of accepted drafts, and clients hear
and pay for what they would without drafts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kslserve.config import Settings
from tests.server.serving import Server, get_text, metric_of

TEXT = "".join(
    f'def get_{name}(config):\n    value = config.get("{name}")\n'
    f'    if value is None:\n        raise KeyError("{name}")\n    return value\n\n\n'
    for name in 2 * ("host", "port", "user", "path")
)
TOKENS = 90
Answer = tuple[str, str, dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """Without drafts, and with as many as there are."""
    plain, drafting = (Server(Settings(context=4096, speculation=m)) for m in ("off", "auto"))

    def draft_always() -> None:
        """Whatever it costs on this machine."""
        service = drafting.app.state.service
        assert service is not None
        speculator = service.scheduler._outgoing.speculator
        assert speculator is not None
        speculator.policy = replace(speculator.policy, always=True)

    drafting.call(draft_always)
    yield plain, drafting
    plain.close()
    drafting.close()


def ask(server: Server, chat: bool = False, **more: Any) -> Answer:
    """Text, why it ended, usage, statistics."""
    body = {
        "model": "m", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True,
        "x_kslserve_statistics": True, **more,
    }  # fmt: skip
    if chat:
        body |= {"messages": [{"role": "user", "content": TEXT}], "reasoning_effort": "none"}
    else:
        body["prompt"] = TEXT
    request = urllib.request.Request(
        server.root + ("/v1/chat/completions" if chat else "/v1/completions"),
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.loads(response.read())
    (choice,) = answer["choices"]
    choice["text"] = choice["message"]["content"] if chat else choice["text"]
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return choice["text"], choice["finish_reason"], usage, answer["x_kslserve"]


def check_same(servers: tuple[Server, Server], **more: Any) -> Answer:
    plain, drafted = (ask(server, **more) for server in servers)
    assert drafted[:3] == plain[:3]
    assert plain[3]["rounds"] == plain[2]["completion_tokens"]
    return drafted


def test_a_repetitive_answer_takes_fewer_waves(servers: tuple[Server, Server]) -> None:
    _, reason, usage, took = check_same(servers)
    assert (reason, usage["completion_tokens"]) == ("length", TOKENS)
    assert took["rounds"] < TOKENS / 2
    accepted = sum(took["accepted"].values())
    assert took["rounds"] + accepted == TOKENS
    assert accepted <= sum(took["drafted"].values())
    metrics = get_text(servers[1].root + "/metrics")
    assert metric_of(metrics, "speculative_rounds_total") > 0


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("part", range(1, 10))
def test_stop_strings_end_inside_a_run(
    servers: tuple[Server, Server], chat: bool, part: int
) -> None:
    whole = ask(servers[0], chat)[0]
    place = part * len(whole) // 11
    stop = whole[place : place + 6]
    text, reason, usage, _ = check_same(servers, chat=chat, stop=[stop])
    assert reason == "stop"
    assert text == whole[: whole.index(stop)]
    assert usage["completion_tokens"] < TOKENS


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 17, 18, 19, 20])
def test_limits_end_inside_a_run(servers: tuple[Server, Server], limit: int, chat: bool) -> None:
    _, reason, usage, _ = check_same(servers, chat=chat, max_tokens=limit)
    assert (reason, usage["completion_tokens"]) == ("length", limit)


@pytest.mark.parametrize("seed", range(4))
def test_sampled_answers_are_the_same(servers: tuple[Server, Server], seed: int) -> None:
    more = {"temperature": 1.0, "top_p": 0.95, "presence_penalty": 0.3, "logit_bias": {"300": 2}}
    check_same(servers, seed=seed, **more)
