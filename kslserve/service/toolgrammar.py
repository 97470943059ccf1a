"""ToolGrammar: what a strict tool lets stand between the values of a call, and inside those that
are no free text.

A call is written in segments, each with a grammar of its own, cut where tokens end by nature:

    name     "\\n<function=" NAME ">\\n"
    body     "<parameter=" KEY ">\\n"  or  "</function>\\n" </tool_call>
    value    VALUE "\\n</parameter>\\n"; VALUE is JSON, or what `enum` or `pattern` allow

A value that may be any string has no grammar; `freevalue` finds its end. A string with a small
`maxLength` is one line of that many characters. Larger limits, and a `minLength` without one, are
not enforced: to count, every position of a long text would need a mask, and over raw text the
library takes milliseconds for one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any

from kslserve.core.request import ToolSpec
from kslserve.parse.schema import ToolShape
from kslserve.service.grammar import GrammarError, Grammars, json_part, lark_grammar

NAME_OPEN = "\n<function="
KEY_OPEN = "<parameter="
TAG_END = ">\n"
_VALUE_END = "\n</parameter>\n"
_CALL_END = "</function>\n"
_BREAKERS = frozenset("<>\n\r")
_DEPTH_MAX = 8
_LENGTH_MAX = 200  # characters of a string that is held to its length


def name_grammar(names: Iterable[str], *, opened: bool) -> str:
    """The head of a call. opened: it begins behind `<function=`."""
    opener = "" if opened else _literal(NAME_OPEN) + " "
    return lark_grammar(f"start: {opener}({_one_of(names)}) {_literal(TAG_END)}")


class ToolGrammar:
    """One strict tool. call_close: id of `</tool_call>`. Raises GrammarError that names the
    parameter at fault."""

    __slots__ = ("_call_close", "_keys", "_required", "_values", "name", "shape")

    def __init__(self, tool: ToolSpec, call_close: int, grammars: Grammars) -> None:
        self.name = tool.name
        self.shape = ToolShape(tool.name, tool.parameters)
        self._call_close = call_close
        properties: dict[str, Any] = tool.parameters.get("properties") or {}
        required = tool.parameters.get("required")
        self._keys = tuple(properties)
        self._required = frozenset(required if isinstance(required, list) else ()) & set(properties)
        self._values: dict[str, str | None] = {}
        for name, schema in properties.items():
            try:
                if not name or not _BREAKERS.isdisjoint(name):
                    raise GrammarError("its name cannot be written in a tag")
                self._values[name] = self._value(name, schema, tool.parameters)
                grammar = self._values[name]
                if grammar is not None:
                    grammars.matcher(grammar)
            except GrammarError as error:
                raise GrammarError(f"parameter {name}: {error}") from error

    def body(self, given: AbstractSet[str], *, lead: bool) -> str:
        """What may follow the head or a value. lead: with a line break before it."""
        left = [key for key in self._keys if key not in given]
        typed = [key for key in left if self._values[key] is not None]
        free = [key for key in left if self._values[key] is None]
        forms = [f"{_literal(KEY_OPEN)} ({_one_of(typed)}) {_literal(TAG_END)}"] if typed else []
        if free:
            # Free text that starts with a line break shares an id with the tag.
            forms.append(f'{_literal(KEY_OPEN)} ({_one_of(free)}) {_literal(TAG_END)} "\\n"?')
        if given >= self._required:
            forms.append(f"{_literal(_CALL_END)} <[{self._call_close}]>")
        opener = _literal("\n") + " " if lead else ""
        return lark_grammar(f"start: {opener}({' | '.join(forms)})")

    def value(self, name: str) -> str | None:
        """The grammar of a value and its closing tag; None for free text."""
        return self._values.get(name)

    def _value(self, name: str, schema: Any, root: dict[str, Any]) -> str | None:
        forms = _forms(schema, root, 0)
        if forms is None:
            types = self.shape.types(name)
            if not types or "string" in types:
                return None
            forms = [json_part(schema, root)]
        return lark_grammar(f"start: ({' | '.join(forms)}) {_literal(_VALUE_END)}")


def is_strict(tool: ToolSpec) -> bool:
    """True if the arguments of the tool's calls are to be made exact. A tool that does not say
    which parameters it has takes any."""
    parameters = tool.parameters
    named = isinstance(parameters.get("properties"), dict) and bool(parameters["properties"])
    return tool.strict and (named or parameters.get("additionalProperties") is False)


def _forms(schema: Any, root: dict[str, Any], depth: int) -> list[str] | None:
    """Rules for the texts that are allowed, where these are few or of a pattern; None where the
    types decide."""
    if not isinstance(schema, dict) or depth > _DEPTH_MAX:
        return None
    if "const" in schema:
        return [_plain(schema["const"])]
    if isinstance(schema.get("enum"), list):
        if not schema["enum"]:
            raise GrammarError("an enum without values")
        return [_plain(value) for value in schema["enum"]]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _forms(_definition(reference, root), root, depth + 1)
    if schema.get("type") == "string" and isinstance(schema.get("pattern"), str):
        return [_pattern(schema["pattern"])]
    most = schema.get("maxLength")
    if schema.get("type") == "string" and type(most) is int and most <= _LENGTH_MAX:
        return [_line(schema.get("minLength"), most)]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return _union(schema[key], root, depth)
    return None


def _union(branches: list[Any], root: dict[str, Any], depth: int) -> list[str] | None:
    """Rules of all branches, if one at least is restricted and none is free text."""
    found: list[str] = []
    restricted = False
    for branch in branches:
        forms = _forms(branch, root, depth + 1)
        if forms is not None:
            restricted = True
            found += forms
            continue
        types = ToolShape("", {**root, "properties": {"x": branch}}).types("x")
        if not types or "string" in types:
            return None
        found.append(json_part(branch, root))
    return found if restricted else None


def _definition(reference: str, root: dict[str, Any]) -> Any:
    found: Any = root
    for step in _steps(reference):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _steps(reference: str) -> Iterator[str]:
    for step in reference.removeprefix("#").split("/")[1:]:
        yield step.replace("~1", "/").replace("~0", "~")


def _plain(value: Any) -> str:
    """A value as it stands in a call: strings raw, everything else as JSON."""
    return _literal(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _pattern(pattern: str) -> str:
    """Text in which the pattern is found, as JSON Schema means it: anywhere unless anchored."""
    from llguidance import regex_to_lark

    body = pattern.removeprefix("^")
    anchored = body != pattern
    open_end = not body.endswith("$") or body.endswith("\\$")
    body = body if open_end else body[:-1]
    whole = ("" if anchored else r"[^\n]*") + f"(?:{body})" + (r"[^\n]*" if open_end else "")
    try:
        return f"/{regex_to_lark(whole, 'dw')}/"
    except ValueError as error:
        raise GrammarError(f"pattern {pattern}: {error}") from error


def _line(least: Any, most: int) -> str:
    """One line of [least, most] characters."""
    low = least if type(least) is int and least > 0 else 0
    if most < low:
        raise GrammarError(f"maxLength {most} is below minLength {low}")
    return f"/[^\\n]{{{low},{most}}}/" if most else '""'


def _one_of(texts: Iterable[str]) -> str:
    return " | ".join(map(_literal, texts))


def _literal(text: str) -> str:
    return json.dumps(text)
