"""Types by schema, and values by types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.parse.arguments import convert, escape, strict_json
from kslserve.parse.schema import ToolShape
from tests.unit.parse.parse_support import strict


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "array"}, {"type": "null"}]}, {"array", "null"}),
        ({"oneOf": [{"const": "a"}, {"const": 1}]}, {"string", "integer"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"allOf": [{"description": "x"}, {"type": "object"}]}, {"object"}),
        ({"enum": ["a", "b", None]}, {"string", "null"}),
        ({"enum": [True, 1.5]}, {"boolean", "number"}),
        ({"$ref": "#/$defs/mode"}, {"integer"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/$defs/missing"}, set()),
        ({"$ref": "https://example.org/x"}, set()),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({"description": "x"}, set()),
        ({"type": "file"}, set()),
        ({"type": 7}, set()),
        (True, set()),
        ("nonsense", set()),
    ],
)
def test_types_of_a_parameter(schema: Any, types: set[str]) -> None:
    root = {
        "properties": {"p": schema},
        "$defs": {"mode": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    assert ToolShape("tool", root).types("p") == types


@pytest.mark.parametrize(
    "parameters", [None, {}, [], "x", {"properties": []}, {"properties": None}]
)
def test_odd_schemas_declare_nothing(parameters: Any) -> None:
    shape = ToolShape("tool", parameters)
    assert shape.known == frozenset()
    assert shape.types("anything") == {"string"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("03106", {"string"}, "03106"),
        ("32", {"integer"}, 32),
        ("-0032", {"integer"}, -32),
        ("+5", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("9" * 5000, {"integer"}, "9" * 5000),
        (" 1.50 ", {"number"}, 1.5),
        ("1e999", {"number"}, "1e999"),
        ("NaN", {"number"}, "NaN"),
        ("True", {"boolean"}, True),
        ("false", {"boolean", "null"}, False),
        ("None", {"boolean", "null"}, None),
        ("null", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ("nothing", {"boolean"}, "nothing"),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("[1]", {"object"}, "[1]"),
        ("['a', \"it's\"]", {"array"}, ["a", "it's"]),
        ("{'a': True, 'b': None}", {"object"}, {"a": True, "b": None}),
        ("{1: 2}", {"object"}, "{1: 2}"),
        ("[1, NaN]", {"array"}, "[1, NaN]"),
        ("['\\d']", {"array"}, ["\\d"]),
        ("[" * 3000, {"array"}, "[" * 3000),
        ('{"a": "x\ny"}', {"object"}, {"a": "x\ny"}),
        ("7", set(), 7),
        ("true", set(), True),
        ('"quoted"', set(), '"quoted"'),
        ("plain", set(), "plain"),
        ("{broken", set(), "{broken"),
        ("x", {"string", "integer"}, "x"),
        ("4", {"string", "integer"}, 4),
    ],
)
def test_convert(text: str, types: set[str], value: Any) -> None:
    got = strict(convert(text, frozenset(types)))
    assert got == value
    assert type(got) is type(value)


TYPES = st.sets(
    st.sampled_from(["string", "integer", "number", "boolean", "object", "array", "null"])
)


@given(st.text(max_size=40) | st.text("[]{}'\",:0123eE+-.truefalsnN \n", max_size=20), TYPES)
def test_any_text_converts_to_strict_json(text: str, types: set[str]) -> None:
    got = convert(text, frozenset(types))
    got.encode()
    value = strict(got)
    if types == {"string"}:
        assert value == text


@given(st.lists(st.text(max_size=8)))
def test_escaped_pieces_join(pieces: list[str]) -> None:
    assert json.loads('"' + "".join(map(escape, pieces)) + '"') == "".join(pieces)


def test_strict_json() -> None:
    assert strict_json({"a": float("nan")}) is None
    assert strict_json({"a": {1, 2}}) is None
    assert strict_json("é") == '"é"'
    assert strict_json("\ud800") == '"\\ud800"'
