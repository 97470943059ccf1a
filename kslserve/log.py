"""One-line structured logs: `time level event key=value ...` on standard error.

Values with spaces or quotes are quoted as JSON. Built on `logging`, so embedding programs can route
it.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

ROOT = "kslserve"


class Logger:
    """A named logger; `event` is a short fixed phrase, the rest are fields."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields)

    def _emit(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            parts = [event, *(f"{key}={_show(value)}" for key, value in fields.items())]
            self._logger.log(level, "%s", " ".join(parts))


def get(name: str) -> Logger:
    return Logger(logging.getLogger(f"{ROOT}.{name}"))


def setup(level: str) -> None:
    """Send this package's lines at `level` and above to standard error; a second call replaces."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    root = logging.getLogger(ROOT)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    # Quoting keeps one event on one line whatever a client sent.
    if text.isprintable() and text and not any(c in text for c in ' "='):
        return text
    return json.dumps(text, ensure_ascii=True)
