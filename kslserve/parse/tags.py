"""Tags: the few pieces of markup a tool call is made of, found at a place in text that may still
grow.

    call  = "<tool_call>" function "</tool_call>"
    function = "<function=" name ">" { param } "</function>"
    param = "<parameter=" name ">" value "</parameter>"

Line breaks stand between them. Drifts that are read too: `<function name="x">`, an opener cut off
by the end of its line, `</function_call>` and its kin, and the tool's own name as the tag
(`alias`).
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

GAP_MAX = 64  # white space between two tags; more is text
_NAME = r"[^<>\n]{0,128}"
_TAG_MAX = 160  # characters of the longest tag


class Kind(enum.Enum):
    CALL_OPEN = "<tool_call>"
    CALL_CLOSE = "</tool_call>"
    FUNCTION_OPEN = "<function="
    FUNCTION_CLOSE = "</function>"
    PARAM_OPEN = "<parameter="
    PARAM_CLOSE = "</parameter>"


CLOSERS = frozenset((Kind.CALL_CLOSE, Kind.FUNCTION_CLOSE, Kind.PARAM_CLOSE))


class Sign(enum.Enum):
    """What stands at a place, if no tag does."""

    WAIT = "the text so far does not tell"
    TEXT = "something else"
    END = "nothing: the output has ended"


@dataclass(frozen=True, slots=True)
class Tag:
    """start, end: its span in the text. name: of an opener, may be empty."""

    kind: Kind
    start: int
    end: int
    name: str = ""


_TAG = re.compile(
    r"<(?:/(?P<close>parameter|tool_call|function\w{0,32})>|(?P<call>tool_call)>"
    r"|(?P<open>parameter|function)(?:=| name=)(?P<name>" + _NAME + r")(?:>|(?=\n)))"
)


def _begun(literal: str) -> str:
    """Pattern of every beginning of `literal`, the empty one included."""
    pattern = ""
    for letter in reversed(literal):
        pattern = f"(?:{re.escape(letter)}{pattern})?"
    return pattern


_BEGUN = re.compile(
    "<(?:"
    + "|".join(
        (
            r"/function\w{0,32}",
            r"(?:parameter|function)(?:=| name=)" + _NAME,
            *map(_begun, ("/function>", "/parameter>", "/tool_call>", "tool_call>")),
            *map(_begun, ("parameter=", "parameter name=", "function=", "function name=")),
        )
    )
    + ")"
)
_CLOSE_KINDS = {"parameter": Kind.PARAM_CLOSE, "tool_call": Kind.CALL_CLOSE}
_OPEN_KINDS = {"parameter": Kind.PARAM_OPEN, "function": Kind.FUNCTION_OPEN}
_GAP = re.compile(r"[ \t\r\n]*")


def tag_at(text: str, at: int, final: bool, alias: str = "") -> Tag | Sign:
    """The tag that starts at text[at] == "<", WAIT if it may still become one, else TEXT."""
    match = _TAG.match(text, at)
    if match is not None:
        if match["call"]:
            return Tag(Kind.CALL_OPEN, at, match.end())
        if match["close"]:
            kind = _CLOSE_KINDS.get(match["close"], Kind.FUNCTION_CLOSE)
            return Tag(kind, at, match.end())
        return Tag(_OPEN_KINDS[match["open"]], at, match.end(), _clean_name(match["name"]))
    if alias:
        closer = f"</{alias}>"
        if text.startswith(closer, at):
            return Tag(Kind.FUNCTION_CLOSE, at, at + len(closer))
        if not final and begins(closer, text, at):
            return Sign.WAIT
    if not final and len(text) - at <= _TAG_MAX and _BEGUN.fullmatch(text, at):
        return Sign.WAIT
    return Sign.TEXT


def next_tag(text: str, at: int, final: bool, alias: str = "") -> Tag | Sign:
    """The tag after white space at `at`."""
    at = skip_gap(text, at)
    if at < 0:
        return Sign.TEXT
    if at == len(text):
        return Sign.END if final else Sign.WAIT
    return tag_at(text, at, final, alias) if text[at] == "<" else Sign.TEXT


def skip_gap(text: str, at: int) -> int:
    """Index after the white space at `at`; -1 if that is too much for the space between tags."""
    match = _GAP.match(text, at)
    end = at if match is None else match.end()
    return end if end - at <= GAP_MAX else -1


def begins(literal: str, text: str, at: int) -> bool:
    """True if all of text[at:] is a beginning of `literal`, shorter than it."""
    return len(text) - at < len(literal) and literal.startswith(text[at:])


def _clean_name(raw: str) -> str:
    """Name as written in an opener: `x`, ` x `, `"x"` or `"x" type="string"`."""
    name = raw.strip()
    if name[:1] in ('"', "'"):
        return name[1:].split(name[0], 1)[0].strip()
    return name.rstrip("\"'")
