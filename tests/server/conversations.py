"""Captured conversations of real clients, played against a server: the server is made to give the
captured answers, and each request echoes what the server really said, as its client would.

A dialect here is what a client knows of it: where the history is, how an assistant's turn looks in
it, and how to put the ids and the reasoning that the server gave in the place of the captured ones.
"""

from __future__ import annotations

import copy
import gzip
import json
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "clients"
REASONING = "I should look at the project files first."
Json = dict[str, Any]


@dataclass(slots=True)
class Call:
    call_id: str
    name: str
    arguments: Json


@dataclass(slots=True)
class Turn:
    """What an assistant said. prompt, cached, output: tokens; signature: of its reasoning."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    signature: str | None = None
    prompt: int = 0
    cached: int = 0
    output: int = 0

    @property
    def whole(self) -> int:
        """Tokens of the prompt and of the generated turn."""
        return self.prompt + self.output

    @property
    def value(self) -> tuple[str, list[tuple[str, Json]]]:
        return self.text.strip(), [(call.name, call.arguments) for call in self.calls]


def spelled(turn: Turn) -> str:
    """The output of a model that means this turn: neither its spaces nor its JSON are those of the
    template."""
    text = f"{turn.reasoning or REASONING}  \n</think>\n\n{turn.text}"
    for call in turn.calls:
        text += f"\n\n\n<tool_call>\n<function={call.name}>\n"
        for name, value in call.arguments.items():
            if not isinstance(value, str):
                value = json.dumps(value, separators=(" ,", ":"))
            text += f"<parameter={name}>\n{value}\n</parameter>\n"
        text += "</function>\n</tool_call>\n"
    return text


class Chat:
    path = "/chat/completions"
    history = "messages"

    def turn(self, entries: list[Json]) -> Turn:
        """The assistant's turn that entries of a history begin with."""
        message = entries[0]
        assert message["role"] == "assistant"
        return Turn(
            message.get("content") or "",
            message.get("reasoning_content") or "",
            [
                Call(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"]))
                for c in message.get("tool_calls") or ()
            ],
        )

    def answer(self, body: Json) -> Turn:
        """What a response says."""
        turn = self.turn([body["choices"][0]["message"]])
        usage = body["usage"]
        turn.prompt, turn.output = usage["prompt_tokens"], usage["completion_tokens"]
        turn.cached = usage["prompt_tokens_details"]["cached_tokens"]
        return turn

    def echo(self, entries: Iterable[Json], said: Turn, ours: Turn, ids: dict[str, str]) -> None:
        """Rewrite a history that holds the captured turn as if the server's had been there."""
        for message in entries:
            if message.get("tool_call_id") in ids:
                message["tool_call_id"] = ids[message["tool_call_id"]]
            for call in message.get("tool_calls") or ():
                if call["id"] in ids:
                    call["id"] = ids[call["id"]]
                    if "reasoning_content" in message:
                        message["reasoning_content"] = ours.reasoning


class Messages:
    path = "/messages"
    history = "messages"

    def turn(self, entries: list[Json]) -> Turn:
        assert entries[0]["role"] == "assistant"
        turn = Turn()
        for block in entries[0]["content"]:
            match block["type"]:
                case "thinking":
                    turn.reasoning += block["thinking"]
                    turn.signature = block["signature"]
                case "text":
                    turn.text += block["text"]
                case "tool_use":
                    turn.calls.append(Call(block["id"], block["name"], block["input"]))
        return turn

    def answer(self, body: Json) -> Turn:
        turn = self.turn([body])
        usage = body["usage"]
        turn.cached, turn.output = usage["cache_read_input_tokens"], usage["output_tokens"]
        turn.prompt = usage["input_tokens"] + turn.cached + usage["cache_creation_input_tokens"]
        return turn

    def echo(self, entries: Iterable[Json], said: Turn, ours: Turn, ids: dict[str, str]) -> None:
        for message in entries:
            blocks = message["content"] if isinstance(message["content"], list) else []
            if message["role"] == "assistant" and self.turn([message]) == said:
                for block in blocks:
                    if block["type"] == "thinking":
                        block.update(thinking=ours.reasoning, signature=ours.signature)
            for block in blocks:
                for key in ("id", "tool_use_id"):
                    if block.get(key) in ids:
                        block[key] = ids[block[key]]


class Responses:
    path = "/responses"
    history = "input"

    def turn(self, entries: list[Json]) -> Turn:
        turn = Turn()
        for item in entries:
            match item.get("type", "message"):
                case "reasoning":
                    parts = item.get("content") or item.get("summary") or ()
                    turn.reasoning += "".join(part["text"] for part in parts)
                    turn.signature = item.get("encrypted_content")
                case "function_call":
                    arguments = json.loads(item["arguments"])
                    turn.calls.append(Call(item["call_id"], item["name"], arguments))
                case "custom_tool_call":
                    arguments = {"input": item["input"]}
                    turn.calls.append(Call(item["call_id"], item["name"], arguments))
                case "message" if item["role"] == "assistant":
                    turn.text += "".join(part["text"] for part in item["content"])
                case _:
                    break
        return turn

    def answer(self, body: Json) -> Turn:
        turn = self.turn(body["output"])
        usage = body["usage"]
        turn.prompt, turn.output = usage["input_tokens"], usage["output_tokens"]
        turn.cached = usage["input_tokens_details"]["cached_tokens"]
        return turn

    def echo(self, entries: Iterable[Json], said: Turn, ours: Turn, ids: dict[str, str]) -> None:
        thought: Json | None = None
        for item in entries:
            if item.get("type") == "reasoning":
                thought = item
            if item.get("call_id") in ids:
                item["call_id"] = ids[item["call_id"]]
                if thought is not None:
                    _give_reasoning(thought, ours)
            if item.get("type") != "reasoning":
                thought = None


def _give_reasoning(item: Json, ours: Turn) -> None:
    """What a client keeps of a reasoning item, with the server's content."""
    if "encrypted_content" in item:
        item["encrypted_content"] = ours.signature
    for name in ("content", "summary"):
        if item.get(name):
            item[name] = [{**item[name][0], "text": ours.reasoning}]


Dialect = Chat | Messages | Responses
DIALECTS: dict[str, Dialect] = {"chat": Chat(), "messages": Messages(), "responses": Responses()}


def dialect_of(name: str) -> Dialect:
    """By the name of a file; the names that say nothing are of clients with one dialect."""
    client, _, kind = name.partition(".")
    other = {"claude": "messages", "codex": "responses"}.get(client, "chat")
    return DIALECTS.get(kind) or DIALECTS[other]


def conversation(name: str) -> list[Json]:
    """Bodies of a file's last requests of which each continues the one before."""
    dialect = dialect_of(name)
    file = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    bodies: list[Json] = []
    for request in file["requests"]:
        body = request["body"]
        before = [_meaning(entry) for entry in bodies[-1][dialect.history]] if bodies else []
        now = [_meaning(entry) for entry in body[dialect.history]]
        bodies = [*bodies, body] if now[: len(before)] == before else [body]
    return bodies


def _meaning(entry: Json) -> Json:
    """An entry without what clients vary from request to request."""
    content = entry.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if content is None:
        return entry
    return {
        **entry,
        "content": [{k: v for k, v in part.items() if k != "cache_control"} for part in content],
    }


def ask(url: str, dialect: Dialect, body: Json, force: Turn | None = None) -> Turn:
    """Send a request and read its answer."""
    sent = {**body, "stream": False}
    sent.pop("stream_options", None)
    if force is not None:
        sent["x_kslserve_force"] = spelled(force)
    request = urllib.request.Request(
        url + dialect.path, json.dumps(sent).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return dialect.answer(json.load(response))


def play(url: str, name: str) -> list[Turn]:
    """Play a conversation; returns what the client got for each request."""
    dialect = dialect_of(name)
    bodies = conversation(name)
    turns: list[Turn] = []
    echoes: list[tuple[Turn, Turn]] = []  # captured turns and what was said instead
    for number, captured in enumerate(bodies):
        body = copy.deepcopy(captured)
        entries = body[dialect.history]
        for said, ours in echoes:
            calls = zip(said.calls, ours.calls, strict=True)
            dialect.echo(entries, said, ours, {a.call_id: b.call_id for a, b in calls})
        wanted = Turn("Done.", "Nothing is left.")
        if number + 1 < len(bodies):
            wanted = dialect.turn(bodies[number + 1][dialect.history][len(entries) :])
        turns.append(ask(url, dialect, body, wanted))
        assert turns[-1].value == wanted.value
        echoes.append((wanted, turns[-1]))
    return turns
