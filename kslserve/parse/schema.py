"""ToolShape: what a declared tool says about its parameters, so far as parsing needs it.

JSON Schema comes in every style: `type` as a name or a list, anyOf with null, allOf, references
(also to itself), enums and constants without a type, no type at all; and the parameters of a tool
may themselves stand in branches. The answer here is a set of type names, where the empty set means
"anything".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kslserve.core.request import ToolSpec

Types = frozenset[str]

ANY: Types = frozenset()
STRING: Types = frozenset(("string",))

_NAMES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
_DEPTH_MAX = 8
# Keywords that say nothing unless the value is of that type, so a schema with them is meant for it.
_IMPLIED = {
    "object": ("properties", "additionalProperties", "patternProperties", "propertyNames",
               "required", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "contains", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}  # fmt: skip


class ToolShape:
    """known: names of the declared parameters. required: those that must be given."""

    __slots__ = ("_others", "_properties", "_reader", "_types", "known", "name", "required")

    def __init__(self, name: str, parameters: Any = None):
        self.name = name
        self._properties: dict[str, list[Any]] = {}
        self._others: list[Any] = []  # schemas of parameters that are not declared by name
        root = parameters if isinstance(parameters, dict) else {}
        self._reader = _Reader(root)
        required: set[str] = set()
        for schema, certain in _objects(root, root, set(), 0):
            for key, value in _mapping(schema, "properties").items():
                self._properties.setdefault(key, []).append(value)
            self._others.extend(_mapping(schema, "patternProperties").values())
            if isinstance(schema.get("additionalProperties"), dict):
                self._others.append(schema["additionalProperties"])
            if certain and isinstance(schema.get("required"), list):
                required.update(filter(_is_text, schema["required"]))
        self.known = frozenset(self._properties)
        self.required = self.known & required
        self._types: dict[str, Types] = {}

    def types(self, parameter: str) -> Types:
        """Types of a parameter's value; one of which nothing is known is a string."""
        found = self._types.get(parameter)
        if found is None:
            schemas = self._properties.get(parameter, self._others)
            read = [self._reader.types(schema) for schema in schemas]
            found = self._types[parameter] = _union(read) if read else STRING
        return found


def shapes_of(tools: Iterable[ToolSpec]) -> dict[str, ToolShape]:
    """{name: shape} of the tools on offer."""
    return {tool.name: ToolShape(tool.name, tool.parameters) for tool in tools}


def _objects(
    schema: Any, root: dict[str, Any], seen: set[str], depth: int
) -> Iterator[tuple[dict[str, Any], bool]]:
    """The schemas that describe one object: itself, what it refers to, and its branches, each with
    whether it always holds."""
    if not isinstance(schema, dict) or depth > _DEPTH_MAX:
        return
    yield schema, True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        seen.add(reference)
        yield from _objects(_resolve(reference, root), root, seen, depth + 1)
    for key in ("allOf", "anyOf", "oneOf"):
        for branch in _list(schema, key):
            for found, certain in _objects(branch, root, seen, depth + 1):
                yield found, certain and key == "allOf"


class _Reader:
    """Reads types, each reference once: a schema may refer to itself."""

    __slots__ = ("_references", "_root")

    def __init__(self, root: dict[str, Any]):
        self._root = root
        self._references: dict[str, Types] = {}

    def types(self, schema: Any, depth: int = 0) -> Types:
        if not isinstance(schema, dict) or depth > _DEPTH_MAX:
            return ANY
        types = self._stated(schema, depth)
        return types | {"null"} if types and schema.get("nullable") is True else types

    def _stated(self, schema: dict[str, Any], depth: int) -> Types:
        stated = schema.get("type")
        if isinstance(stated, str):
            return frozenset((stated,)) & _NAMES
        if isinstance(stated, list):
            return frozenset(filter(_is_text, stated)) & _NAMES
        if isinstance(schema.get("$ref"), str):
            return self._referred(schema["$ref"], depth)
        if "const" in schema:
            return _types_of_values((schema["const"],))
        if isinstance(schema.get("enum"), list):
            return _types_of_values(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if branches := _list(schema, key):
                return _union([self.types(branch, depth + 1) for branch in branches])
        found = ANY
        for branch in _list(schema, "allOf"):
            types = self.types(branch, depth + 1)
            found = (found & types or types) if found and types else found or types
        if found:
            return found
        for name, keywords in _IMPLIED.items():
            if any(keyword in schema for keyword in keywords):
                return frozenset((name,))
        return ANY

    def _referred(self, reference: str, depth: int) -> Types:
        if reference not in self._references:
            self._references[reference] = ANY  # what it says of itself while it is being read
            found = self.types(_resolve(reference, self._root), depth + 1)
            self._references[reference] = found
        return self._references[reference]


def _union(branches: list[Types]) -> Types:
    """Of alternatives; one that takes anything makes them all take anything."""
    return ANY if not all(branches) else frozenset[str]().union(*branches)


def _types_of_values(values: Iterable[Any]) -> Types:
    names = {
        str: "string",
        bool: "boolean",
        int: "integer",
        float: "number",
        dict: "object",
        list: "array",
        type(None): "null",
    }
    return frozenset(names[type(value)] for value in values if type(value) in names)


def _resolve(reference: str, root: dict[str, Any]) -> Any:
    """The schema at a local JSON pointer; None if there is none."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and len(step) < 6:
            found = found[int(step)] if int(step) < len(found) else None
        elif isinstance(found, dict):
            found = found.get(step)
        else:
            return None
    return found


def _mapping(schema: dict[str, Any], key: str) -> dict[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
