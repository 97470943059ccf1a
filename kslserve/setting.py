"""One setting: how its text or TOML value reads, in which range, and how it is written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kslserve.errors import UsageError

AUTO = -1  # the parsed value of "auto" where a number is meant


@dataclass(frozen=True, slots=True)
class Spec:
    """How one setting reads. kind: str, int, float, switch, bytes, list, choice. auto: the word
    `auto` is allowed and becomes AUTO."""

    kind: str
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    auto: bool = False
    flag: bool = True


def setting(default: Any, kind: str, help: str, **more: Any) -> Any:
    """A field of the table; `more` are further fields of its Spec."""
    spec = Spec(kind, help, **more)
    if isinstance(default, list):
        return field(default=tuple(default), metadata={"spec": spec})
    return field(default=default, metadata={"spec": spec})


def parse(label: str, spec: Spec, raw: Any) -> Any:
    """One raw value (text, or a TOML value) as the setting's type, in range. UsageError names it by
    the label."""
    value = _convert(label, spec, raw)
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    if numeric and not (spec.auto and value == AUTO):
        if spec.low is not None and value < spec.low:
            raise UsageError(f"{label} must be at least {spec.low:g}, not {value:g}.")
        if spec.high is not None and value > spec.high:
            raise UsageError(f"{label} must be at most {spec.high:g}, not {value:g}.")
    return value


def _convert(label: str, spec: Spec, raw: Any) -> Any:
    if spec.auto and raw == "auto":
        return AUTO
    if spec.kind == "switch":
        if isinstance(raw, bool):
            return raw
        if raw in ("0", "1"):
            return raw == "1"
        raise UsageError(f"{label} is a switch: 0 or 1, not {raw!r}.")
    if spec.kind == "list":
        items = [raw] if isinstance(raw, str) else raw
        if not isinstance(items, (list, tuple)) or not all(isinstance(i, str) for i in items):
            raise UsageError(f"{label} is a list of texts, not {raw!r}.")
        return tuple(items)
    if spec.kind == "choice":
        if raw not in spec.choices:
            raise UsageError(f"{label} must be one of {', '.join(spec.choices)}, not {raw!r}.")
        return raw
    if spec.kind == "bytes":
        return _bytes(label, raw)
    if spec.kind in ("int", "float"):
        return _number(label, spec, raw)
    if not isinstance(raw, str):
        raise UsageError(f"{label} is a text, not {raw!r}.")
    return raw


def _number(label: str, spec: Spec, raw: Any) -> int | float:
    make = int if spec.kind == "int" else float
    noun = "a whole number" if spec.kind == "int" else "a number"
    accepted = (str, int) if spec.kind == "int" else (str, int, float)
    auto = " or auto" if spec.auto else ""
    if isinstance(raw, accepted) and not isinstance(raw, bool):
        try:
            value = make(raw)
        except ValueError:
            pass
        else:
            if abs(value) < 1e18:  # also refuses NaN and infinities
                return value
    raise UsageError(f"{label} must be {noun}{auto}, not {raw!r}.")


_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def _bytes(label: str, raw: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    if isinstance(raw, str):
        text = raw.strip()
        for unit, factor in reversed(_UNITS.items()):
            number = text[: len(text) - len(unit)].strip()
            if text.endswith(unit) and number.isdecimal():
                return int(number) * factor
    raise UsageError(f"{label} is a size such as 64MiB (KiB, MiB, GiB or bytes), not {raw!r}.")


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'
