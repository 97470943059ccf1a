"""Which tool a JSON object or a list of argument names means."""

from __future__ import annotations

from typing import Any

import pytest

from kslserve.parse.infer import by_keys, meant
from kslserve.parse.schema import ToolShape


def shape(name: str, required: str, optional: str = "") -> ToolShape:
    properties = {key: {} for key in (required + " " + optional).split()}
    return ToolShape(name, {"properties": properties, "required": required.split()})


SHAPES = {
    found.name: found
    for found in (
        shape("read", "path", "limit"),
        shape("edit", "path old new"),
        shape("run", "command", "timeout"),
        shape("watch", "command", "timeout"),
        shape("wait", "", "timeout"),
        shape("grep", "pattern", "glob kind"),
        shape("find", "pattern root", "kind"),
    )
}


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ("path", "read"),  # its required ones exactly
        ("path old new", "edit"),
        ("path limit", "read"),
        ("path old", "edit"),
        ("command", None),  # twins
        ("command timeout", None),
        ("timeout", None),
        ("pattern", "grep"),
        ("pattern kind", "grep"),  # a tie in keys; only it has all that it needs
        ("pattern root kind", "find"),
        ("pattern glob x", "grep"),
        ("path x y", None),  # as much foreign as known
        ("x", None),
        ("", None),
    ],
)
def test_by_keys(keys: str, name: str | None) -> None:
    found = by_keys(keys.split(), SHAPES)
    assert (found and found.name) == name


def test_equal_required_sets_are_a_tie() -> None:
    twins = {name: shape(name, "a") for name in ("x", "y")}
    assert by_keys(["a"], twins) is None
    assert by_keys(["a"], {"x": twins["x"]}) is twins["x"]


ARGUMENTS = {"path": "a"}


@pytest.mark.parametrize(
    ("value", "name", "arguments"),
    [
        ({"name": "read", "arguments": ARGUMENTS}, "read", ARGUMENTS),
        ({"name": "read", "parameters": ARGUMENTS}, "read", ARGUMENTS),
        ({"name": "read", "input": '{"path": "a"}'}, "read", ARGUMENTS),
        ({"name": "read", "arguments": None}, "read", {}),
        ({"name": "read", "arguments": ""}, "read", {}),
        ({"tool": "read", "path": "a", "type": "function", "id": "1"}, "read", ARGUMENTS),
        ({"function": {"name": "read", "arguments": ARGUMENTS}}, "read", ARGUMENTS),
        ({"tool_call": {"tool_call": {"name": "read"}}}, "read", {}),
        ({"name": "other", "arguments": {}}, "other", {}),
        ({"name": {"path": "a"}}, "read", ARGUMENTS),
        ({"name": {"input": {"arguments": {"path": "a"}}}}, "read", ARGUMENTS),
    ],
)
def test_meant(value: dict[str, Any], name: str, arguments: dict[str, Any]) -> None:
    found = meant(value, SHAPES, infer=True)
    assert found is not None
    assert (found.name, found.arguments) == (name, arguments)
    assert found.shape is SHAPES.get(name)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"name": 3},
        {"arguments": ARGUMENTS},
        {"name": "read", "arguments": [1]},
        {"name": "read", "arguments": "not json"},
        {"name": {"command": "ls"}},
        {"name": {"other": {"path": "a"}}},
        {"name": {"x": 1, "input": {"path": "a"}}},
        {"tool_call": {"tool_call": {"tool_call": {"tool_call": {"tool_call": {"name": "read"}}}}}},
    ],
)
def test_nothing_is_meant(value: dict[str, Any]) -> None:
    assert meant(value, SHAPES, infer=True) is None


def test_without_inference_a_name_is_needed() -> None:
    assert meant({"name": {"path": "a"}}, SHAPES, infer=False) is None
    assert meant({"name": "read"}, SHAPES, infer=False) is not None
