"""Targets of fuzzing: the output parser, the HTTP reader, and the body reader of each dialect."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kslserve.api import chat, completions, messages_parse, responses
from kslserve.core.request import ToolSpec
from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.errors import KslError
from kslserve.http.flow import HttpLimits
from kslserve.http.reader import RequestReader
from tests.fuzz.loop import Attempt
from tests.runners.files import named
from tests.unit.parse.parse_support import cut, parse, spec, strings

SEEDS = json.loads((Path(__file__).parent / "seeds" / "online.json").read_text(encoding="utf-8"))

# ---------------------------------------------------------------- parser

DRIFTS = json.loads(
    (Path(__file__).parents[1] / "data" / "drift.json").read_text(encoding="utf-8")
)["drifts"]
TOOLS = (
    (strings("Read", "path"), strings("Write", "path", "content"), spec("bare")),
    (
        spec(
            "run",
            {
                "type": "object",
                "properties": {
                    "n": {"type": "integer"},
                    "list": {"type": "array"},
                    "note": {"type": ["string", "null"]},
                    "any": {},
                    "path": {"type": "string"},
                },
                "required": ["n"],
            },
        ),
        strings("Read", "path", "content"),
        strings("parameter", "name", "function"),
    ),
    (),
)
MARKUP: tuple[str, ...] = tuple(SEEDS["markup"])
TEXTS = tuple(
    text for drift in DRIFTS for text in (*drift["prose"], *(e["text"] for e in drift["calls"]))
) + tuple("".join(case["chunks"]) for case in named("parser_malformed", "parser_framing"))
REASONS = (FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP_STRING)


def parser(rng: random.Random) -> None:
    """Any text gives events; cuts do not change them; without a call no text is lost."""
    text = _output(rng)
    tools = rng.choice(TOOLS)
    options: dict[str, Any] = {
        "thinking": rng.random() < 0.3,
        "reason": rng.choice(REASONS),
        "tools_enabled": rng.random() < 0.95,
    }
    places = [rng.randrange(len(text) + 1) for _ in range(rng.randrange(12))]
    check_cuts(text, places, tools, **options)


def check_cuts(text: str, places: list[int], tools: tuple[ToolSpec, ...], **options: Any) -> None:
    whole = parse([text], tools, **options)
    for pieces in (list(text), cut(text, places)):
        got = parse(pieces, tools, **options)
        assert got.merged == whole.merged, (text, pieces, options)
    if not whole.calls and not options["thinking"]:
        assert whole.content == text


def _output(rng: random.Random) -> str:
    parts = []
    if rng.random() < 0.4:
        base = rng.choice(TEXTS)
        at = rng.randrange(len(base) + 1)
        parts = [base[:at], base[at + rng.randrange(4) :]]
    for _ in range(rng.randrange(1, 16)):
        part = rng.choice(MARKUP)
        if rng.random() < 0.15:
            part = part[: rng.randrange(len(part) + 1)]
        parts.insert(rng.randrange(len(parts) + 1), part)
    return "".join(parts)


# ---------------------------------------------------------------- HTTP

LIMITS = HttpLimits(head_bytes=4096, head_lines=40, body_bytes=20000)
REQUESTS = tuple(text.encode("latin-1") for text in SEEDS["http"])
PIECES = tuple(text.encode("latin-1") for text in SEEDS["http_pieces"])


def http(rng: random.Random) -> None:
    """Bytes become requests or one clear error, and cuts do not matter."""
    data = bytearray(b"".join(rng.choice(REQUESTS) for _ in range(rng.randrange(1, 4))))
    for _ in range(rng.randrange(5)):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.choice((0, 0, 1, 2, 8))] = rng.choice(PIECES)
    if rng.random() < 0.2 and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(8)))
    whole = _read(bytes(data), [])
    for marks in (places, list(range(len(data)))):
        got = _read(bytes(data), marks)
        assert got == whole, (bytes(data), marks, got, whole)


def _read(data: bytes, places: list[int]) -> tuple[list[tuple[Any, ...]], bool]:
    """(requests, whether an error ended them); which of several errors is seen first may differ"""
    reader = RequestReader(LIMITS)
    found: list[tuple[Any, ...]] = []
    marks = [0, *places, len(data)]
    try:
        for start, end in itertools.pairwise(marks):
            piece, at = data[start:end], 0
            while at < len(piece):
                before = at
                if reader.request is None:
                    at = reader.feed_head(piece, at)
                else:
                    at = reader.feed_body(piece, at)
                assert before <= at <= len(piece)
                if reader.complete:
                    request = reader.take()
                    headers = {k: v for k, v in request.headers.items() if k != "x-request-id"}
                    found.append(
                        (request.method, request.path, request.query, headers, request.body)
                    )
                    reader.reset()
    except KslError as error:
        _check_error(error)
        return found, True
    return found, False


# ---------------------------------------------------------------- bodies

DEFAULTS = SamplingParams()
VALUES: tuple[Any, ...] = tuple(SEEDS["values"])


def body_target(name: str, read: Callable[[bytes], Any]) -> Attempt:
    """Mutations of a dialect's bodies give a request or a sentence, nothing else."""
    seeds = [json.dumps(body) for body in SEEDS["bodies"][name]]
    if name in ("chat", "messages", "responses"):
        seeds += [
            json.dumps(case["request"])
            for case in named(f"api_{name}")
            if "$raw" not in case["request"] and case["api"] == name
        ]
    keys = sorted({key for seed in seeds for key in _keys(json.loads(seed))})

    def attempt(rng: random.Random) -> None:
        body = json.loads(rng.choice(seeds))
        body.setdefault("model", "m")
        for _ in range(rng.randrange(1, 5)):
            _mutate(rng, body, keys)
        data = json.dumps(body).encode()
        if rng.random() < 0.1:
            at = rng.randrange(len(data))
            data = data[:at] + rng.choice((b"", b"\xff", b"[", b"}", b"\\u0000")) + data[at + 1 :]
        read_or_refuse(read, data)

    return attempt


def read_or_refuse(read: Callable[[bytes], Any], data: bytes) -> None:
    try:
        read(data)
    except KslError as error:
        _check_error(error)


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [*value, *(key for item in value.values() for key in _keys(item))]
    return [key for item in value for key in _keys(item)] if isinstance(value, list) else []


def _mutate(rng: random.Random, root: dict[str, Any], keys: list[str]) -> None:
    """Change one place of a JSON value."""
    holder: Any = root
    while True:
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        inner = [at for at in places if isinstance(holder[at], dict | list) and holder[at]]
        if not inner or rng.random() < 0.25:
            break
        holder = holder[rng.choice(inner)]
    value = rng.choice(VALUES) if rng.random() < 0.8 else root.get(rng.choice(list(root) or [""]))
    value = json.loads(json.dumps(value))
    choice = rng.random()
    if isinstance(holder, dict):
        if choice < 0.3 or not holder:
            holder[rng.choice(keys)] = value
        elif choice < 0.8:
            holder[rng.choice(list(holder))] = value
        else:
            del holder[rng.choice(list(holder))]
    elif choice < 0.4 or not holder:
        holder.insert(rng.randrange(len(holder) + 1), value)
    elif choice < 0.8:
        holder[rng.randrange(len(holder))] = value
    else:
        holder.append(holder[rng.randrange(len(holder))])


def _check_error(error: KslError) -> None:
    assert 400 <= error.status < 500, error
    assert error.message.endswith((".", "?")), error.message
    assert len(error.message) < 2000
    error.message.encode()


def _messages(data: bytes) -> object:
    hidden = messages_parse.DefaultThinking.HIDDEN
    messages_parse.parse(data, DEFAULTS, hidden, lambda: None, count_only=True)
    return messages_parse.parse(data, DEFAULTS, hidden, lambda: None)


READERS: dict[str, Callable[[bytes], Any]] = {
    "chat": lambda data: chat.parse(data, DEFAULTS),
    "completions": lambda data: completions.parse(data, DEFAULTS),
    "messages": _messages,
    "responses": lambda data: responses.parse(data, DEFAULTS),
}
TARGETS: dict[str, Attempt] = {
    "parser": parser,
    "http": http,
    **{name: body_target(name, read) for name, read in READERS.items()},
}
