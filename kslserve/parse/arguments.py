"""Arguments: the text of a parameter -> a fragment of strict JSON, guided by the declared types.

The format has no types of its own: a string stands raw, everything else as JSON. A value that does
not fit its declared type stays the string it was; nothing here raises.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from json.encoder import encode_basestring
from typing import Any, NoReturn

from kslserve.parse.schema import ANY, Types

NULLS = ("null", "None")

_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERAL_MAX = 100_000  # characters; Python literals are a courtesy, not worth a long parse


def quote(text: str) -> str:
    """`text` as a JSON string."""
    return strict_json(text) or '""'


def escape(text: str) -> str:
    """`text` as a part of a JSON string, without the quotes."""
    return encode_basestring(text)[1:-1]


def convert(text: str, types: Types) -> str:
    """JSON of a parameter's value. types: the declared ones, empty for anything."""
    plain = text.strip()
    if types is ANY or not types:
        return _any(plain) or quote(text)
    if "null" in types and plain in NULLS:
        return "null"
    if "boolean" in types and plain.lower() in ("true", "false"):
        return plain.lower()
    if "integer" in types and (found := _integer(plain)) is not None:
        return found
    if "number" in types and (found := _number(plain)) is not None:
        return found
    wanted = tuple(kind for name, kind in (("object", dict), ("array", list)) if name in types)
    if wanted and (found := _container(plain, wanted)) is not None:
        return found
    return quote(text)


def strict_json(value: Any) -> str | None:
    """JSON that every parser takes, None if the value has none (NaN, a set, a deep nest)."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # lone surrogates must stay escapes
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
    return text


def load(text: str) -> Any:
    """A JSON value; raw line breaks inside strings are allowed. Raises ValueError or
    RecursionError."""
    return json.loads(text, strict=False, parse_constant=_no_constant)


def load_object(text: str) -> dict[str, Any] | None:
    """A JSON object, or None."""
    try:
        value = load(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _any(plain: str) -> str | None:
    """JSON of a value without a declared type: JSON that is no string, else None."""
    if plain in ("true", "false", "null"):
        return plain
    if plain[:1] in ("{", "["):
        return _container(plain, (dict, list))
    return _number(plain)


def _integer(plain: str) -> str | None:
    if _INTEGER.fullmatch(plain):
        return str(int(plain))
    # 5.0 is an integer to JSON Schema.
    found = _number(plain)
    if found is None:
        return None
    value = float(found)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else None


def _number(plain: str) -> str | None:
    """The number as written: re-printing could lose digits."""
    if len(plain) > 4000 or not _NUMBER.fullmatch(plain) or not math.isfinite(float(plain)):
        return None
    return plain


def _container(plain: str, wanted: tuple[type, ...]) -> str | None:
    """JSON of an object or array, as written where that is strict JSON."""
    try:
        value = json.loads(plain, parse_constant=_no_constant)
        return plain if isinstance(value, wanted) else None
    except (ValueError, RecursionError):
        pass
    try:
        value = load(plain)
    except (ValueError, RecursionError):
        value = _python_literal(plain)
    return strict_json(value) if isinstance(value, wanted) else None


def _python_literal(plain: str) -> Any:
    """Value of a Python literal such as `{'deep': True}` with string keys, None if it is none."""
    if len(plain) > _LITERAL_MAX:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = ast.literal_eval(plain)
        return value if _has_string_keys(value) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _has_string_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_string_keys(item) for key, item in value.items())
    return all(map(_has_string_keys, value)) if isinstance(value, list | tuple) else True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
