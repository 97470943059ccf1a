"""Tools of a Responses body: every kind of tool as a function that the model is offered, and the
way back from the function's name to the item that the client expects.

A member of a namespace goes by its plain name where that is unique and by `namespace.name` where it
is not. A free-form tool becomes a function with one text parameter. Hosted tools (web search and
the like) run on the vendor's servers: they are not offered, and asking for them is no error.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kslserve.api.choice import ALLOWED, Choice, allowed_choice
from kslserve.api.fields import Fields
from kslserve.core.request import ToolChoice, ToolSpec
from kslserve.errors import UnsupportedParameter

CUSTOM_PARAMETER = "input"
SEARCH_NAME = "tool_search"
_CALLABLE = ("function", "custom", SEARCH_NAME)  # kinds that `tool_choice` may name

# Characters that would end the name inside `<function=NAME>`.
_NAME_BREAKERS = frozenset("<>\n\r")


class ToolKind(enum.Enum):
    """What a call of the tool is sent as."""

    FUNCTION = "function_call"
    CUSTOM = "custom_tool_call"
    SEARCH = "tool_search_call"


@dataclass(frozen=True, slots=True)
class Origin:
    """A tool in the client's words."""

    kind: ToolKind
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Declared:
    """A tool as declared. parameters: of the function that the model is offered.
    strict: its arguments must be exactly what they allow."""

    origin: Origin
    description: str | None
    parameters: dict[str, Any] | None
    deferred: bool = False
    strict: bool = False


class ToolTable:
    """The tools of one request. specs: what the model is offered, in order of declaration; of two
    tools with one name and namespace the first counts. loaded: tools that came with the history;
    their names give way, so that those before them never change."""

    __slots__ = ("_names", "_origins", "_specs")

    def __init__(self, declared: Iterable[Declared] = (), loaded: Iterable[Declared] = ()) -> None:
        self._origins: dict[str, Origin] = {}
        self._names: dict[tuple[str | None, str], str] = {}
        self._specs: dict[str, ToolSpec] = {}
        unique: dict[tuple[str | None, str], Declared] = {}
        for tool in declared:
            unique.setdefault((tool.origin.namespace, tool.origin.name), tool)
        shared = Counter(name for _, name in unique)
        for tool in unique.values():
            self._add(tool, plain=shared[tool.origin.name] == 1)
        for tool in loaded:
            if (tool.origin.namespace, tool.origin.name) not in self._names:
                self._add(tool, plain=tool.origin.name not in self._origins)

    def _add(self, tool: Declared, *, plain: bool) -> None:
        namespace, name = tool.origin.namespace, tool.origin.name
        shown = name if plain or namespace is None else f"{namespace}.{name}"
        if shown not in self._origins:
            self._origins[shown] = tool.origin
            self._names[namespace, name] = shown
            self._specs[shown] = _spec(shown, tool)

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(self._specs.values())

    def definition(self, tool: Declared) -> dict[str, Any]:
        """How the model is told of a tool."""
        shown = self.shown(tool.origin.name, tool.origin.namespace)
        spec = self._specs.get(shown)
        return _spec(shown, tool).definition if spec is None else spec.definition

    def origin(self, shown: str) -> Origin:
        """The tool of a name that the model used; a name that nobody declared is a function's."""
        return self._origins.get(shown) or Origin(ToolKind.FUNCTION, shown)

    def shown(self, name: str, namespace: str | None = None) -> str:
        """The name under which the model knows, or knew, a tool."""
        found = self._names.get((namespace, name))
        if found is None and namespace is not None and name in self._origins:
            return f"{namespace}.{name}"
        return name if found is None else found

    def __contains__(self, shown: str) -> bool:
        return shown in self._origins


def declared_tools(entries: Iterable[Fields], *, deferred: bool = False) -> list[Declared]:
    """The tools of a `tools` list that can be offered. deferred: all of them are known to the
    parser and not to the prompt's head, as those with `defer_loading` are."""
    found: list[Declared] = []
    for entry in entries:
        if entry.required_text("type") == "namespace":
            namespace = _name(entry)
            for member in entry.objects("tools"):
                found += _one(member, namespace, deferred)
        else:
            found += _one(entry, None, deferred)
    return found


def _one(entry: Fields, namespace: str | None, deferred: bool) -> list[Declared]:
    kind = entry.text("type") or "function"
    description = entry.text("description")
    deferred = deferred or entry.boolean("defer_loading") or False
    if kind == "function":
        origin = Origin(ToolKind.FUNCTION, _name(entry), namespace)
        strict = entry.boolean("strict") or False
        return [Declared(origin, description, _parameters(entry), deferred, strict)]
    if kind == "custom":
        origin = Origin(ToolKind.CUSTOM, _name(entry), namespace)
        parameters: dict[str, Any] = {
            "type": "object",
            "properties": {CUSTOM_PARAMETER: {"type": "string", "description": _form(entry)}},
            "required": [CUSTOM_PARAMETER],
        }
        return [Declared(origin, description, parameters, deferred)]
    if kind == "tool_search" and entry.text("execution") == "client":
        origin = Origin(ToolKind.SEARCH, SEARCH_NAME)
        return [Declared(origin, description, _parameters(entry))]
    return []


def _name(entry: Fields) -> str:
    name = entry.required_text("name")
    if not name or not _NAME_BREAKERS.isdisjoint(name):
        entry.refuse("name", "must be a name without angle brackets and line breaks")
    return name


def _parameters(entry: Fields) -> dict[str, Any] | None:
    parameters = entry.object("parameters")
    return None if parameters is None else parameters.value


def _form(entry: Fields) -> str:
    """What a free-form tool takes, in words."""
    form = entry.object("format")
    grammar = form.text("definition") if form is not None else None
    if form is None or grammar is None:
        return "The whole input of the tool, as plain text."
    syntax = form.text("syntax") or "given"
    return f"The whole input of the tool, as plain text of this {syntax} grammar:\n{grammar}"


def _spec(shown: str, tool: Declared) -> ToolSpec:
    function: dict[str, Any] = {"name": shown}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    definition = {"type": "function", "function": function}
    parameters = tool.parameters or {}
    return ToolSpec(shown, definition, parameters, deferred=tool.deferred, strict=tool.strict)


def tool_choice_of(body: Fields, tools: ToolTable) -> Choice:
    """`tool_choice`, with shown names. A choice that only a hosted tool could meet leaves the model
    free."""
    value = body.raw("tool_choice")
    if value is None:
        return Choice()
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            body.refuse("tool_choice", "must be auto, none, required, a tool or allowed_tools")
        if value == "required" and not tools.specs:
            if not body.items("tools"):
                body.refuse("tool_choice", "needs tools")
            return Choice()
        return Choice(ToolChoice(value))
    entry = body.object("tool_choice")
    assert entry is not None
    kind = entry.required_text("type")
    if kind == ALLOWED:
        # hosted tools are not offered, so that they may be called means nothing
        offered = (tool for tool in entry.objects("tools") if tool.text("type") in _CALLABLE)
        return allowed_choice(entry, [_named(tool, tools) for tool in offered])
    if kind not in _CALLABLE:
        if any(tool.text("type") == kind for tool in body.objects("tools")):
            return Choice()
        path = entry.at("type")
        raise UnsupportedParameter(f"{path} must be function, custom or {ALLOWED}.", param=path)
    return Choice(ToolChoice.NAMED, _named(entry, tools))


def _named(entry: Fields, tools: ToolTable) -> str:
    """The shown name of an entry that refers to a tool."""
    search = entry.text("type") == SEARCH_NAME
    name = SEARCH_NAME if search else entry.required_text("name")
    shown = tools.shown(name, entry.text("namespace"))
    if shown not in tools:
        entry.refuse("type" if search else "name", "must name one of the tools")
    return shown
