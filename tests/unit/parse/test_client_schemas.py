"""Every tool schema that agent clients were seen to send (data/clients_schemas.json.gz, without its
prose): values of each declared type come back as they are, and any text becomes an argument."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kslserve.parse.arguments import convert
from kslserve.parse.schema import ANY, ToolShape
from tests.unit.parse.parse_support import parse, spec, strict

FILE = Path(__file__).parents[2] / "data" / "clients_schemas.json.gz"
CLIENTS: dict[str, list[dict[str, Any]]] = json.loads(gzip.decompress(FILE.read_bytes()))
TEXTS = (
    "",
    "text",
    "5",
    "-0.5",
    "1e999",
    "true",
    "False",
    "null",
    "None",
    "[1]",
    '{"a": 1}',
    "[",
    "'",
)
KINDS = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict,
    "array": list, "null": type(None),
}  # fmt: skip


def example(schema: dict[str, Any]) -> Any:
    """A value that the schema takes."""
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example({**schema[key][0], **{k: v for k, v in schema.items() if k != key}})
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object" or (kind is None and "properties" in schema):
        return {key: example(inner) for key, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [example(schema.get("items", {}))]
    return {"integer": 7, "number": 0.5, "boolean": True, "null": None}.get(kind, 'a "text"\n<b>')


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@pytest.mark.parametrize("client", CLIENTS)
def test_values_come_back(client: str) -> None:
    for tool in CLIENTS[client]:
        name, parameters = tool["name"], tool["parameters"]
        wanted = example({**parameters, "type": "object"})
        members = "".join(
            f"<parameter={key}>\n{written(value)}\n</parameter>\n" for key, value in wanted.items()
        )
        text = f"<tool_call>\n<function={name}>\n{members}</function>\n</tool_call>"
        for pieces in ([text], list(text)):
            assert parse(pieces, [spec(name, parameters)]).arguments() == [(name, wanted)]


@pytest.mark.parametrize("client", CLIENTS)
def test_any_text_becomes_an_argument(client: str) -> None:
    for tool in CLIENTS[client]:
        shape = ToolShape(tool["name"], tool["parameters"])
        assert shape.known >= shape.required
        assert shape.known == tool["parameters"].get("properties", {}).keys()
        for name in shape.known:
            types = shape.types(name)
            for text in TEXTS:
                value = strict(convert(text, types))
                fits = types is ANY or not types or any(isinstance(value, KINDS[t]) for t in types)
                assert fits or value == text


NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}, "many": {"items": {"$ref": "#"}}},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"$ref": "#/$defs/node"}, {"object"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/$defs/either"}, set()),
        ({"$ref": "#/$defs/missing"}, set()),
        ({"$ref": "https://example.com/schema"}, set()),
        ({"$ref": "#/$defs/list/anyOf/1"}, {"integer"}),
        ({"$ref": "#/$defs/list"}, {"string", "integer"}),
        ({"allOf": [{"$ref": "#/$defs/list"}, {"type": "string"}]}, {"string"}),
        ({"allOf": [{"minLength": 1}, {"description": "x"}]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {}]}, set()),
        ({"oneOf": [{"const": 1}, {"enum": ["a", None]}]}, {"integer", "string", "null"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"type": "made-up"}, set()),
        ({"additionalProperties": {"type": "string"}}, {"object"}),
        ({"propertyNames": {"pattern": "^a"}}, {"object"}),
        ({"prefixItems": [{}]}, {"array"}),
        ({"minimum": 1}, {"number"}),
        ({"pattern": "^a"}, {"string"}),
        (True, set()),
        (7, set()),
    ],
)
def test_types_of_a_schema(schema: Any, types: set[str]) -> None:
    root = {
        "type": "object",
        "properties": {"x": schema},
        "$defs": {
            "node": NODE,
            "loop": {"$ref": "#/$defs/loop"},
            "either": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/either"}]},
            "list": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        },
    }
    assert ToolShape("t", root).types("x") == types


def test_parameters_of_branches_and_references() -> None:
    shape = ToolShape(
        "t",
        {
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"n": {"type": "integer"}}}],
            "anyOf": [
                {"properties": {"a": {"type": "string"}, "n": {"type": "null"}}, "required": ["a"]},
                {"$ref": "#"},
            ],
            "$defs": {"base": {"properties": {"p": {"type": "boolean"}}, "required": ["p"]}},
            "additionalProperties": {"type": "number"},
        },
    )
    assert shape.known == {"p", "n", "a"}
    assert shape.required == {"p"}
    assert shape.types("n") == {"integer", "null"}
    assert shape.types("other") == {"number"}
    assert ToolShape("t", {"patternProperties": {"^x": {"type": "array"}}}).types("x1") == {"array"}


def test_a_schema_that_explodes_is_read_once() -> None:
    branch = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * 20}
    root = {
        "anyOf": branch["anyOf"],
        "properties": {"x": branch},
        "$defs": {"a": branch, "b": branch},
    }
    assert ToolShape("t", root).types("x") == ANY
