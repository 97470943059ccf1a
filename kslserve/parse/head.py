"""Head: what begins a call, and the scan for the end of a JSON object in growing text."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

from kslserve.parse.schema import ToolShape


class Family(enum.Enum):
    """How a call strayed from the format."""

    JSON = "json"  # a JSON object in place of the function
    JSON_REPAIRED = "json_repaired"  # one that is not quite JSON
    JSON_INFERRED = "json_inferred"  # one without the tool's name
    LOST_OPENER = "lost_opener"  # one whose beginning is missing
    CHIMERA = "chimera"  # the beginning of one, then parameters
    BARE_FUNCTION = "bare_function"  # no <tool_call> around the function
    OTHER_TAG = "other_tag"  # the tool's name in a tag of another shape
    PARAMETERS = "parameters"  # parameters without any name
    PARAMETER_OPENER = "parameter_opener"  # the tool's name in the tag of a parameter


@dataclass(frozen=True, slots=True)
class Head:
    """A call begins. end: where its parameters start. alias: the tool's name, if that was the tag.
    arguments: the whole arguments, if the call came as one JSON object, which ends at `end`.
    family: None if the call begins as it should."""

    shape: ToolShape
    end: int
    alias: str = ""
    arguments: dict[str, Any] | None = None
    family: Family | None = None


class JsonScan:
    """Finds the end of a JSON object in growing text, looking at each character once."""

    __slots__ = ("_depth", "_in_string", "_seen", "broken", "found")

    _MARKS = re.compile(r'["\\{}\[\]]')

    def __init__(self) -> None:
        self._seen = 0
        self._depth = 0
        self._in_string = False
        self.found = -1  # length of the object
        self.broken = False  # kept by the owner: it is no object up to there

    def end(self, text: str, start: int) -> int:
        """End of the object at text[start] == "{"; -1 if it is not there yet. `start` may move
        between calls, as long as the text after it only grows."""
        if self.found >= 0:
            return start + self.found
        at = start + self._seen
        while (match := self._MARKS.search(text, at)) is not None:
            mark, at = match[0], match.end()
            if mark == "\\":
                if at == len(text):
                    at -= 1
                    break
                at += 1 if self._in_string else 0
            elif mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    self.found = at - start
                    return at
        else:
            at = len(text)
        self._seen = at - start
        return -1
