"""Conversation: a request's messages -> messages that the official templates accept.

The templates take one system message, at the start, and need a user's question somewhere; clients
send several, later ones, and tool results in the order in which tools finished. What clients vary
between the requests of one session must not vary in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kslserve.core.request import Message, Role
from kslserve.errors import InvalidRequest

RESPONSE_OPEN = "<tool_response>"
RESPONSE_CLOSE = "</tool_response>"

TemplateMessage = dict[str, Any]


def normalise(messages: Sequence[Message]) -> list[TemplateMessage]:
    """Messages for a template, at least one of them a user's question.

    Leading system messages become one; a later one becomes a reminder in the user or tool turn
    before it (after an assistant turn: in the one that follows). Tool results follow the calls'
    order. Raises InvalidRequest without a user's question.
    """
    lead = 0
    while lead < len(messages) and messages[lead].role is Role.SYSTEM:
        lead += 1
    turns: list[TemplateMessage] = []
    if lead:
        texts = [text for message in messages[:lead] if (text := message.text.strip())]
        turns.append({"role": "system", "content": "\n\n".join(texts)})
    conversation = [_template_message(message) for message in _place_reminders(messages[lead:])]
    if not lead:
        conversation = _open_leading_results(conversation)
    turns += conversation
    if last_query_index(turns) < 0:
        raise InvalidRequest("The messages contain no user message.", param="messages")
    return turns


def is_wrapped_response(text: str) -> bool:
    """True for user text that the templates take for tool output instead of a question."""
    text = text.strip()
    return text.startswith(RESPONSE_OPEN) and text.endswith(RESPONSE_CLOSE)


def last_query_index(messages: Sequence[TemplateMessage]) -> int:
    """Index of the last user's question, -1 if there is none: the templates' own rule."""
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message["role"] == "user" and not is_wrapped_response(message["content"]):
            return index
    return -1


def _place_reminders(messages: Sequence[Message]) -> list[Message]:
    """Move system messages into neighbouring user and tool turns; put tool results in call
    order."""
    turns: list[list[Message]] = []  # tool results of one turn together, every other message alone
    before: dict[int, list[str]] = {}  # turn -> reminders at its start
    after: dict[int, list[str]] = {}  # turn -> reminders at its end
    waiting: list[str] = []
    for message in messages:
        if message.role is Role.SYSTEM:
            reminder = f"<system-reminder>\n{message.text.strip()}\n</system-reminder>"
            if turns and turns[-1][0].role in (Role.USER, Role.TOOL):
                after.setdefault(len(turns) - 1, []).append(reminder)
            else:
                waiting.append(reminder)
        elif message.role is Role.TOOL and turns and turns[-1][0].role is Role.TOOL:
            turns[-1].append(message)
        else:
            turns.append([message])
            if waiting and message.role in (Role.USER, Role.TOOL):
                before[len(turns) - 1] = waiting
                waiting = []
    if waiting:
        hosts = [i for i, turn in enumerate(turns) if turn[0].role in (Role.USER, Role.TOOL)]
        if hosts:
            after.setdefault(hosts[-1], []).extend(waiting)
    placed: list[Message] = []
    for index, turn in enumerate(turns):
        if turn[0].role is Role.TOOL and index:
            turn = _in_call_order(turn, turns[index - 1][0])
        if index in before:
            turn = [_reminded(turn[0], before[index], start=True), *turn[1:]]
        if index in after:
            turn = [*turn[:-1], _reminded(turn[-1], after[index], start=False)]
        placed += turn
    return placed


def _in_call_order(results: list[Message], caller: Message) -> list[Message]:
    """Results of known calls in the order of the calls; the others keep their places."""
    order = {call.call_id: place for place, call in enumerate(caller.tool_calls)}
    known = [place for place, result in enumerate(results) if result.call_id in order]
    ordered = list(results)
    by_call = sorted(known, key=lambda place: order[results[place].call_id or ""])
    for place, source in zip(known, by_call, strict=True):
        ordered[place] = results[source]
    return ordered


def _reminded(message: Message, reminders: list[str], *, start: bool) -> Message:
    """`message` with the reminders; user text that is wrapped as tool output stays so."""
    text = message.text.strip()
    head = tail = ""
    if message.role is Role.USER and is_wrapped_response(text):
        head, text, tail = (
            RESPONSE_OPEN,
            text[len(RESPONSE_OPEN) : -len(RESPONSE_CLOSE)],
            RESPONSE_CLOSE,
        )
    parts = [*reminders, text] if start else [text, *reminders]
    joined = "\n\n".join(part for part in parts if part)
    return Message(message.role, head + joined + tail, call_id=message.call_id)


def _template_message(message: Message) -> TemplateMessage:
    entry: TemplateMessage = {"role": message.role.value, "content": message.text}
    if message.role is Role.ASSISTANT:
        if message.reasoning is not None:
            entry["reasoning_content"] = message.reasoning
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.tool_calls
            ]
    return entry


def _open_leading_results(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """The templates open no turn for tool results at the very start; one user turn says the
    same."""
    count = 0
    while count < len(messages) and messages[count]["role"] == "tool":
        count += 1
    if not count:
        return messages
    results = [
        f"{RESPONSE_OPEN}\n{message['content'].strip()}\n{RESPONSE_CLOSE}"
        for message in messages[:count]
    ]
    return [{"role": "user", "content": "\n".join(results)}, *messages[count:]]
