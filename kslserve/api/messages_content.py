"""Content blocks and tools of a Messages body as core values.

Clients send their whole history each time and vary what means nothing: cache marks, a single text
block or a plain string, results in the order in which tools finished. None of it may show in the
prompt. Blocks that a text model cannot read become a placeholder, unknown ones are dropped and
counted: an error would come back with every later request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from kslserve.api.chat_messages import CONTENT_OMITTED, IMAGE_OMITTED
from kslserve.api.fields import Fields, noun
from kslserve.core.request import Message, Role, ToolCall, ToolSpec
from kslserve.errors import InvalidRequest

# A line for the vendor's accounting; it changes from request to request, at the very start.
BILLING = "x-anthropic-billing-header"

_ROLES = {
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
}
# Characters that would end the name inside `<function=NAME>`.
_NAME_BREAKERS = frozenset("<>\n\r")


class Blocks:
    """Reads the content of one request. tools: offered ones, deferred ones included; definitions
    that messages bring along are added. dropped: called once for each unknown block."""

    def __init__(self, tools: list[ToolSpec], dropped: Callable[[], None]) -> None:
        self.tools = tools
        self._dropped = dropped

    def system(self, body: Fields) -> list[Message]:
        """The `system` field: a string or a list of text blocks, without the billing line."""
        value = body.raw("system")
        if isinstance(value, str):
            if value.startswith(BILLING):
                value = value.partition("\n")[2]
            texts = [value]
        else:
            blocks = self._blocks(body, "system")
            texts = [self._text_of(block) for block in blocks if not _is_billing(block)]
        return [Message(Role.SYSTEM, text) for text in texts if _says_something(text)]

    def messages(self, body: Fields) -> list[Message]:
        """The `messages` list. Raises InvalidRequest naming the field at fault."""
        if not body.items("messages"):
            body.refuse("messages", "must be a list with at least one message")
        found: list[Message] = []
        for entry in body.objects("messages"):
            name = entry.required_text("role")
            role = _ROLES.get(name)
            if role is None:
                entry.refuse("role", f"must be one of {', '.join(_ROLES)}")
            if role is Role.ASSISTANT:
                found.append(self._assistant(entry))
            elif role is Role.USER:
                found += self._user(entry)
            else:
                blocks = self._blocks(entry, "content")
                text = self._joined(block for block in blocks if not _is_billing(block))
                if _says_something(text):
                    found.append(Message(role, text))
        return found

    def _assistant(self, entry: Fields) -> Message:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for block in self._blocks(entry, "content"):
            kind = block.text("type")
            if kind == "thinking":
                thoughts.append(block.text("thinking") or "")
            elif kind == "tool_use":
                arguments = block.object("input")
                calls.append(
                    ToolCall(
                        block.text("id") or "",
                        block.required_text("name"),
                        {} if arguments is None else arguments.value,
                    )
                )
            elif kind != "redacted_thinking":
                texts.append(self._text_of(block))
        reasoning = "".join(thoughts) if thoughts else None
        return Message(Role.ASSISTANT, "".join(texts), reasoning, tuple(calls))

    def _user(self, entry: Fields) -> Iterator[Message]:
        """Tool results first, which is where the model expects them, then what the user said."""
        said: list[Fields] = []
        results = 0
        for block in self._blocks(entry, "content"):
            if block.text("type") != "tool_result":
                said.append(block)
                continue
            results += 1
            content = self._joined(self._blocks(block, "content"))
            yield Message(Role.TOOL, content, call_id=block.text("tool_use_id"))
        if said or not results:
            yield Message(Role.USER, self._joined(said))

    # ------------------------------------------------------------ blocks

    def _blocks(self, entry: Fields, name: str) -> Iterator[Fields]:
        """The blocks of a field; a string is one text block."""
        value = entry.raw(name)
        if value is None:
            return
        path = entry.at(name)
        if isinstance(value, str):
            yield Fields({"type": "text", "text": value}, path)
            return
        if not isinstance(value, list):
            entry.refuse(name, f"must be a string or a list of blocks, not {noun(value)}")
        for index, item in enumerate(value):
            at = f"{path}[{index}]"
            if isinstance(item, str):
                item = {"type": "text", "text": item}
            if not isinstance(item, dict):
                raise InvalidRequest(f"{at} must be an object, not {noun(item)}.", param=at)
            yield Fields(item, at)

    def _joined(self, blocks: Iterator[Fields] | list[Fields]) -> str:
        """Texts one after another, as the templates join parts; tool definitions on lines of their
        own."""
        text = ""
        after_tool = False
        for block in blocks:
            is_tool = block.text("type") in ("tool_reference", "tool_addition", "tool_removal")
            piece = self._text_of(block)
            if piece:
                if text and (is_tool or after_tool) and not text.endswith("\n"):
                    text += "\n"
                text += piece
                after_tool = is_tool
        return text

    def _text_of(self, block: Fields) -> str:
        """What the model reads of a block."""
        kind = block.text("type") or "text"
        match kind:
            case "text":
                return block.required_text("text")
            case "image":
                return IMAGE_OMITTED
            case "document":
                return self._document(block)
            case "search_result":
                return self._joined(self._blocks(block, "content"))
            case "tool_reference":
                return self._definition(block.text("tool_name") or block.text("name"))
            case "tool_addition":
                return self._addition(block)
            case "tool_removal":
                tool = block.object("tool")
                name = None if tool is None else tool.text("name")
                return f"The tool {name} is no longer available." if name else ""
        self._dropped()
        return ""

    def _document(self, block: Fields) -> str:
        """The text of a document that is text."""
        source = block.object("source")
        kind = None if source is None else source.text("type")
        if source is not None and kind == "text":
            return source.text("data") or ""
        if source is not None and kind == "content":
            return self._joined(self._blocks(source, "content"))
        return CONTENT_OMITTED

    def _addition(self, block: Fields) -> str:
        """A tool that comes in the middle of a conversation: named, or defined in place."""
        tool = block.object("tool")
        if tool is None:
            return ""
        inline = tool.object("definition")
        if inline is None:
            return self._definition(tool.text("name"))
        spec = tool_of(inline, deferred=True)
        if spec is None:
            return ""
        if all(known.name != spec.name for known in self.tools):
            self.tools.append(spec)
        return printed(spec)

    def _definition(self, name: str | None) -> str:
        """A tool printed as the templates print their tools; of an unknown one the name."""
        for tool in self.tools:
            if tool.name == name:
                return printed(tool)
        return name or ""


def tools_of(body: Fields) -> list[ToolSpec]:
    """The `tools` list without those that a vendor's servers would run."""
    found = [tool_of(entry) for entry in body.objects("tools")]
    return [tool for tool in found if tool is not None]


def tool_of(entry: Fields, *, deferred: bool = False) -> ToolSpec | None:
    """One entry of a tools list; None for one that is not the client's own."""
    if entry.text("type") not in (None, "custom"):
        return None
    name = entry.required_text("name")
    if not name or not _NAME_BREAKERS.isdisjoint(name):
        entry.refuse("name", "must be a name without angle brackets and line breaks")
    function: dict[str, Any] = {"name": name}
    description = entry.text("description")
    if description is not None:
        function["description"] = description
    schema = entry.object("input_schema")
    if schema is not None:
        function["parameters"] = schema.value
    return ToolSpec(
        name,
        {"type": "function", "function": function},
        {} if schema is None else schema.value,
        deferred=deferred or entry.boolean("defer_loading") or False,
        strict=entry.boolean("strict") or False,
    )


def printed(tool: ToolSpec) -> str:
    """The definition in the JSON form of the templates' tools block."""
    return json.dumps(tool.definition, ensure_ascii=False)


def _says_something(text: str) -> bool:
    return bool(text.strip())


def _is_billing(block: Fields) -> bool:
    return (block.text("text") or "").startswith(BILLING)
