"""The format of the visible answer, which each dialect asks for in a field of its own."""

from __future__ import annotations

from kslserve.api.fields import Fields
from kslserve.core.request import ResponseFormat

KINDS = ("text", "json_object", "json_schema")


def format_of(entry: Fields | None) -> ResponseFormat | None:
    """`{"type": "json_schema", ...}` with the schema in the object itself or, as Chat Completions
    has it, in its field `json_schema`. None for text."""
    if entry is None:
        return None
    kind = entry.choice("type", KINDS) or "text"
    if kind == "text":
        return None
    if kind == "json_object":
        return ResponseFormat(path=entry.path)
    inner = entry.object("json_schema") or entry
    inner.text("name")
    schema = inner.required_object("schema")
    return ResponseFormat(schema.value, inner.boolean("strict") or False, schema.path)
