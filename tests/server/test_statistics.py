"""`x_kslserve_statistics`: what an answer took, at its end, in every dialect, when asked."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from kslserve.config import Settings
from tests.server.serving import Server

TEXT = "one two three four five six seven eight " * 12
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT, "max_tokens": 60, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 60,
        "ignore_eos": True,
    },
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 60},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 60},
}
FIELDS = {
    "seed", "prefill_s", "decode_s", "cached_tokens", "prefilled_tokens", "rounds", "drafted",
    "accepted", "ladder",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(Settings(context=4096, speculation="ngram"))
    yield server
    server.close()


def ask(server: Server, path: str, **more: Any) -> str:
    body = {"model": "m", "temperature": 0, **ASKS[path], **more}
    request = urllib.request.Request(
        server.root + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def objects_of(answer: str) -> list[dict[str, Any]]:
    """Every x_kslserve object of a body, or of the frames of a stream, in order."""
    if answer.startswith("{"):
        bodies = [json.loads(answer)]
    else:
        lines = [line[5:] for line in answer.splitlines() if line.startswith("data:")]
        bodies = [json.loads(line) for line in lines if "[DONE]" not in line]
    found = []
    for body in bodies:
        for part in (body, body.get("message"), body.get("response")):
            if isinstance(part, dict) and "x_kslserve" in part:
                found.append(part["x_kslserve"])
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKS)
def test_what_an_answer_took(server: Server, path: str, stream: bool) -> None:
    for found in objects_of(ask(server, path, stream=stream)):
        assert found.keys() == {"seed"}
    *_, found = objects_of(ask(server, path, stream=stream, x_kslserve_statistics=True))
    assert found.keys() == FIELDS
    assert found["prefill_s"] > 0.0
    assert found["decode_s"] > 0.0
    assert found["prefilled_tokens"] > 0
    assert 1 <= found["rounds"] <= 60
    assert found["accepted"]["ngram"] <= found["drafted"]["ngram"]
    assert found["drafted"]["mtp"] == 0
    assert found["ladder"] == []


def test_completions_of_several_prompts_are_added_up(server: Server) -> None:
    answer = ask(
        server,
        "/v1/completions",
        prompt=["a b c", "d e f g"],
        max_tokens=5,
        x_kslserve_statistics=True,
    )
    (found,) = objects_of(answer)
    assert found["rounds"] == 10
    usage = json.loads(answer)["usage"]
    assert found["prefilled_tokens"] + found["cached_tokens"] == usage["prompt_tokens"]
