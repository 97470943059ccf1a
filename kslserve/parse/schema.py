"""ToolShape: what a declared tool says about its parameters, so far as parsing needs it.

JSON Schema comes in every style: `type` as a name or a list, anyOf with null, references, enums
without a type, no type at all. The answer here is a set of type names, where the empty set means
"anything".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kslserve.core.request import ToolSpec

Types = frozenset[str]

ANY: Types = frozenset()
STRING: Types = frozenset(("string",))

_NAMES = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
_DEPTH_MAX = 8


class ToolShape:
    """known: names of the declared parameters."""

    __slots__ = ("_properties", "_root", "_types", "known", "name")

    def __init__(self, name: str, parameters: Any = None):
        self.name = name
        self._root = parameters if isinstance(parameters, dict) else {}
        properties = self._root.get("properties")
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self.known = frozenset(self._properties)
        self._types: dict[str, Types] = {}

    def types(self, parameter: str) -> Types:
        """Types of a parameter's value; an undeclared one is a string."""
        if parameter not in self._properties:
            return STRING
        found = self._types.get(parameter)
        if found is None:
            found = self._types[parameter] = _types_of(self._properties[parameter], self._root, 0)
        return found


def shapes_of(tools: Iterable[ToolSpec]) -> dict[str, ToolShape]:
    """{name: shape} of the tools on offer."""
    return {tool.name: ToolShape(tool.name, tool.parameters) for tool in tools}


def _types_of(schema: Any, root: dict[str, Any], depth: int) -> Types:
    if not isinstance(schema, dict) or depth > _DEPTH_MAX:
        return ANY
    types = _stated_types(schema, root, depth)
    return types | {"null"} if types and schema.get("nullable") is True else types


def _stated_types(schema: dict[str, Any], root: dict[str, Any], depth: int) -> Types:
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset((stated,)) & _NAMES
    if isinstance(stated, list):
        return frozenset(name for name in stated if isinstance(name, str)) & _NAMES
    if isinstance(schema.get("$ref"), str):
        return _types_of(_resolve(schema["$ref"], root), root, depth + 1)
    if "const" in schema:
        return _types_of_values((schema["const"],))
    if isinstance(schema.get("enum"), list):
        return _types_of_values(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            branches = [_types_of(branch, root, depth + 1) for branch in schema[key]]
            return ANY if not all(branches) else frozenset[str]().union(*branches)
    if isinstance(schema.get("allOf"), list):
        for branch in schema["allOf"]:
            if types := _types_of(branch, root, depth + 1):
                return types
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in schema else ANY


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
        if not isinstance(found, dict):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found
