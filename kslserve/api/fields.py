"""Typed readers of JSON bodies. Every error names the path of the field (`messages[3].content`).

A field that is absent or null reads as None; unknown fields are never looked at. Booleans are not
numbers, and a whole number is accepted where a float is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import orjson

from kslserve.errors import InvalidRequest

Value = TypeVar("Value")

_NOUNS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a whole number",
    float: "a number",
    type(None): "null",
}


def load_object(body: bytes) -> Fields:
    """The body as an object. Raises InvalidRequest for anything that is not strict UTF-8 JSON, lone
    surrogates and excessive nesting included; of a repeated key the last one counts."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {noun(value)}.")
    return Fields(value)


def noun(value: object) -> str:
    """What a JSON value is, for messages."""
    return _NOUNS.get(type(value), type(value).__name__)


class Fields:
    """One JSON object and its path. path is empty for the body itself."""

    __slots__ = ("path", "value")

    def __init__(self, value: dict[str, Any], path: str = "") -> None:
        self.value = value
        self.path = path

    def at(self, name: str) -> str:
        """The path of a field of this object."""
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, message: str) -> NoReturn:
        """Raise InvalidRequest for a field; `message` continues the sentence after its path."""
        path = self.at(name)
        raise InvalidRequest(f"{path} {message}.", param=path)

    def raw(self, name: str) -> Any:
        return self.value.get(name)

    def has(self, name: str) -> bool:
        return self.value.get(name) is not None

    def text(self, name: str) -> str | None:
        return self._typed(name, str)

    def boolean(self, name: str) -> bool | None:
        return self._typed(name, bool)

    def items(self, name: str) -> list[Any] | None:
        return self._typed(name, list)

    def object(self, name: str) -> Fields | None:
        value = self._typed(name, dict)
        return None if value is None else Fields(value, self.at(name))

    def integer(self, name: str, *, low: int | None = None, high: int | None = None) -> int | None:
        """A whole number in [low, high]; 3.0 counts as 3."""
        value = self.value.get(name)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if value is None or (type(value) is int and self._in_range(name, value, low, high)):
            return value
        self._wrong(name, int)

    def number(self, name: str) -> float | None:
        """A number; its range is the business of whoever uses it."""
        value = self.value.get(name)
        if value is None:
            return None
        if type(value) is not float and type(value) is not int:
            self._wrong(name, float)
        return float(value)

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            self.refuse(name, "is required")
        return value

    def required_object(self, name: str) -> Fields:
        value = self.object(name)
        if value is None:
            self.refuse(name, "is required")
        return value

    def objects(self, name: str) -> Iterator[Fields]:
        """The elements of a list of objects, each with its path; nothing when absent."""
        for index, item in enumerate(self.items(name) or ()):
            path = f"{self.at(name)}[{index}]"
            if not isinstance(item, dict):
                raise InvalidRequest(f"{path} must be an object, not {noun(item)}.", param=path)
            yield Fields(item, path)

    def choice(self, name: str, allowed: tuple[str, ...]) -> str | None:
        value = self.text(name)
        if value is not None and value not in allowed:
            self.refuse(name, f"must be one of {', '.join(allowed)}")
        return value

    def _typed(self, name: str, kind: type[Value]) -> Value | None:
        value = self.value.get(name)
        if value is None or isinstance(value, kind):
            return value
        self._wrong(name, kind)

    def _in_range(self, name: str, value: int, low: int | None, high: int | None) -> bool:
        if low is not None and value < low:
            self.refuse(name, f"must be at least {low}, not {value}")
        if high is not None and value > high:
            self.refuse(name, f"must be at most {high}, not {value}")
        return True

    def _wrong(self, name: str, kind: type) -> NoReturn:
        self.refuse(name, f"must be {_NOUNS[kind]}, not {noun(self.value[name])}")
