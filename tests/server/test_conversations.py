"""The next turn of a conversation computes only what is new: those of real clients, played."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import openai
import pytest

from kslserve.api import chat
from kslserve.config import Settings
from tests.server.api_cases import post
from tests.server.conversations import DIALECTS, Turn, ask, conversation, play
from tests.server.serving import Server, serving

CONVERSATIONS = (
    *("claude.interactive", "claude.messages", "claude.resume", "claude.tool-search"),
    *("cline.chat", "codex.freeform", "codex.responses", "continue.chat"),
    *("copilot-cli.chat", "copilot-cli.messages", "copilot-cli.responses"),
    *("kimi-code.chat", "kimi-code.messages", "kimi-code.responses"),
    *("mini-swe-agent.chat", "opencode.chat", "opencode.messages"),
    *("pi.chat", "pi.messages", "pi.responses", "qwen-code.chat", "qwen-code.resume"),
)
MISSING_MAX = 16
SETTINGS: dict[str, Any] = {"context": 65536, "max_seqs": 2, "test_hooks": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Without a model: its tokens are forced, and its bookkeeping is the real one."""
    with serving(Settings(engine="fake", **SETTINGS)) as running:
        yield running


@pytest.fixture(scope="module")
def native() -> Iterator[Server]:
    with serving(Settings(**{**SETTINGS, "context": 8192})) as running:
        yield running


@pytest.fixture(scope="module")
def shares(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Lines of a table that is printed at the end, whether output is captured or not."""
    lines: list[str] = []
    yield lines
    capture = request.config.pluginmanager.getplugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        print("\n".join(["", f"{'client':30}request  prompt  cached  share", *lines]))


def check(name: str, answers: list[Turn], lines: list[str]) -> None:
    for number, answer in enumerate(answers):
        share = answer.cached / answer.prompt
        lines.append(f"{name:30}{number + 1:7}{answer.prompt:8}{answer.cached:8}{share:7.1%}")
    for before, answer in itertools.pairwise(answers):
        assert before.whole - MISSING_MAX <= answer.cached <= before.whole


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation(server: Server, shares: list[str], name: str) -> None:
    check(name, play(server.url, name), shares)


@pytest.mark.parametrize("name", ["pi.chat", "mini-swe-agent.chat"])
def test_a_conversation_with_the_bundled_model(
    native: Server, shares: list[str], name: str
) -> None:
    answers = play(native.url, name)
    assert answers[0].cached == 0
    check(name + " (native)", answers, shares)


@pytest.mark.parametrize("name", ["continue.chat", "opencode.chat", "pi.chat"])
def test_a_new_conversation_shares_the_system_turn(server: Server, name: str) -> None:
    """Another question in the same folder: tools and system text are there already."""
    first = conversation(name)[0]
    ask(server.url, DIALECTS["chat"], first, Turn("Yes."))
    other = {**first, "messages": [*first["messages"][:-1], {"role": "user", "content": "Why?"}]}
    answer = ask(server.url, DIALECTS["chat"], other, Turn("So."))
    assert system_tokens(server, other) - MISSING_MAX <= answer.cached < answer.prompt
    assert answer.cached >= 0.9 * answer.prompt


def system_tokens(server: Server, body: dict[str, Any]) -> int:
    """Tokens of the system turn of a request."""
    service = server.app.state.service
    assert service is not None
    request = chat.parse(body, service.model.defaults)
    return service.preparer.prepare_now(request).boundaries[0]


def test_forced_output_needs_test_hooks() -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "What is 2+2?"}],
        "max_tokens": 8,
        "seed": 1,
    }
    with serving(Settings(engine="fake", context=4096)) as server:
        plain = ask(server.url, DIALECTS["chat"], body)
        forced = ask(server.url, DIALECTS["chat"], body, Turn("Forced."))
    assert (forced.text, forced.reasoning) == (plain.text, plain.reasoning)


def test_parallel_requests_share_one_prefill(server: Server) -> None:
    """Two subagents of one client, started together with the same prompt."""
    bodies = conversation("claude.subagent")
    assert len(bodies) == 2
    assert bodies[0]["messages"] == bodies[1]["messages"]
    with ThreadPoolExecutor(2) as pool:
        send = partial(ask, server.url, DIALECTS["messages"], force=Turn("Found it."))
        turns = sorted(pool.map(send, bodies), key=lambda turn: turn.cached)
    assert turns[0].prompt == turns[1].prompt
    assert turns[0].cached < 0.1 * turns[0].prompt
    assert turns[1].cached > 0.99 * turns[1].prompt


def test_a_stream_tells_of_cached_tokens(server: Server) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Why is the sky blue? " * 20}],
        "max_tokens": 4,
    }
    whole = ask(server.url, DIALECTS["chat"], body)
    usage = {}
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        for chunk in client.chat.completions.create(
            **body, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage.model_dump() if chunk.usage else usage
    assert usage["prompt_tokens"] == whole.prompt
    assert whole.prompt - MISSING_MAX <= usage["prompt_tokens_details"]["cached_tokens"]


TEXT = "Why is the sky blue? " * 20
REPEATED: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    # A body, and where usage has the whole prompt (a sum) and the cached part of it.
    "/chat/completions": (
        {"messages": [{"role": "user", "content": TEXT}]},
        ("prompt_tokens",),
        ("prompt_tokens_details", "cached_tokens"),
    ),
    "/completions": (
        {"prompt": TEXT}, ("prompt_tokens",), ("prompt_tokens_details", "cached_tokens")
    ),
    "/messages": (
        {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4},
        ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
        ("cache_read_input_tokens",),
    ),
    "/responses": ({"input": TEXT}, ("input_tokens",), ("input_tokens_details", "cached_tokens")),
}  # fmt: skip


@pytest.mark.parametrize("path", REPEATED)
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_every_dialect_tells_what_was_cached(path: str, cache: bool) -> None:
    body, prompt, cached = REPEATED[path]
    with serving(Settings(engine="fake", context=4096, prefix_cache=cache)) as server:
        usages = []
        for _ in range(2):
            request = {"model": "m", "max_tokens": 4, **body}
            if path == "/responses":
                request["max_output_tokens"] = request.pop("max_tokens")
            status, _, answer = post(server, "/v1" + path, json.dumps(request).encode())
            assert status == 200, answer
            usages.append(json.loads(answer)["usage"])
    found = []
    for usage in usages:
        at = usage
        for name in cached:
            at = at[name]
        found.append((sum(usage[name] for name in prompt), at))
    (size, first), (again, second) = found
    assert (first, again) == (0, size)
    assert size - MISSING_MAX <= second < size if cache else second == 0
