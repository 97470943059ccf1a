"""Infer: which tool does a JSON object or a list of argument names mean?

The name may stand under other keys, the call inside shells, or there may be no name at all. Without
one the tool is found by the names of its arguments; where two fit equally well, none does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kslserve.parse.arguments import load_object
from kslserve.parse.schema import ToolShape

NAME_KEYS = ("name", "function", "tool", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "input")
_SHELLS = frozenset(("function", "arguments", "parameters", "input", "tool_call"))
_PEELS_MAX = 3


@dataclass(frozen=True, slots=True)
class Meant:
    """name: as written, declared or not; shape: None if it is not declared. inferred: from the
    names of the arguments."""

    name: str
    shape: ToolShape | None
    arguments: dict[str, Any]
    inferred: bool = False


def by_keys(keys: Iterable[str], shapes: Mapping[str, ToolShape]) -> ToolShape | None:
    """The one tool that takes arguments of these names."""
    given = frozenset(keys)
    exact = [shape for shape in shapes.values() if given and shape.required == given]
    if exact:
        return exact[0] if len(exact) == 1 else None
    best: list[ToolShape] = []
    top = 0
    for shape in shapes.values():
        overlap = len(given & shape.known)
        score = 2 * overlap - len(given - shape.known)
        if overlap and score >= max(top, 1):
            best = [*best, shape] if score == top else [shape]
            top = score
    if len(best) > 1:
        best = [shape for shape in best if shape.required and shape.required <= given]
    return best[0] if len(best) == 1 else None


def meant(
    value: dict[str, Any], shapes: Mapping[str, ToolShape], *, infer: bool, depth: int = 0
) -> Meant | None:
    """What a JSON object calls, or None. infer: the arguments may tell the tool."""
    if depth > _PEELS_MAX:
        return None
    inner = value.get("tool_call")
    if isinstance(inner, dict):
        return meant(inner, shapes, infer=infer, depth=depth + 1)
    for key in NAME_KEYS:
        name = value.get(key)
        if isinstance(name, str):
            arguments = _arguments(value, key)
            return None if arguments is None else Meant(name, shapes.get(name), arguments)
        if isinstance(name, dict):
            if any(isinstance(name.get(inner), str) for inner in NAME_KEYS):
                found = meant(name, shapes, infer=infer, depth=depth + 1)
                if found is not None and found.shape is not None:
                    return found
            return _nameless(name, shapes) if infer else None
    return None


def _arguments(value: dict[str, Any], name_key: str) -> dict[str, Any] | None:
    for key in ARGUMENT_KEYS:
        if key in value:
            given = value[key]
            if given is None or given == "":
                return {}
            if isinstance(given, str):
                given = load_object(given)
            return given if isinstance(given, dict) else None
    return {key: item for key, item in value.items() if key not in (name_key, "type", "id")}


def _nameless(arguments: dict[str, Any], shapes: Mapping[str, ToolShape]) -> Meant | None:
    for _ in range(_PEELS_MAX + 1):
        shape = by_keys(arguments, shapes)
        if shape is not None:
            return Meant(shape.name, shape, arguments, inferred=True)
        if len(arguments) != 1:
            return None
        ((key, inner),) = arguments.items()
        if key not in _SHELLS or not isinstance(inner, dict):
            return None
        arguments = inner
    return None
