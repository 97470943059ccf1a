"""Where the constraint sees a free value end, the parser does, too."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.core.events import ToolCallDelta, ToolCallStart
from kslserve.core.request import ToolSpec
from kslserve.core.usage import FinishReason
from kslserve.parse.schema import ToolShape
from kslserve.parse.stream import OutputParser
from kslserve.service.freevalue import FreeValue

PARAMETERS = {"properties": {"x": {"type": "string"}, "y": {"type": "string"}}}
TOOL = ToolSpec("f", {}, PARAMETERS, strict=True)
HEAD = "<tool_call>\n<function=f>\n<parameter=x>\n"
TAIL = "\n</function>\n</tool_call>"
PIECES = (
    "a", "\n", " ", "<", "</", ">", "b <c>", "</parameter>", "\n</parameter>", "<parameter=x>",
    "\n<parameter=z>\n", "<function=f>", "</function>", "</tool_call>", "<tool_call>",
    "\n<tool_call>\n<function=f>\n<parameter=x>\nhi\n</parameter>\n</function>\n</tool_call>\n",
)  # fmt: skip


def end_of(text: str, cuts: list[int]) -> int | None:
    """Length of the value's text with its closing tag, None if it does not end."""
    value = FreeValue(ToolShape("f", PARAMETERS), "x", frozenset())
    at = 0
    for cut in [*sorted(cuts), len(text)]:
        rest = value.feed(text[at:cut])
        at = cut
        if rest is not None:
            return at - len(rest)
    return None


def argument(text: str) -> list[str]:
    """Values of x in the calls that the parser finds."""
    parser = OutputParser((TOOL,), thinking=False, make_id=str)
    found: list[str] = []
    for event in parser.feed(text) + parser.finish(FinishReason.STOP):
        if isinstance(event, ToolCallStart):
            found.append("")
        elif isinstance(event, ToolCallDelta):
            found[-1] += event.json
    return [json.loads(json_text).get("x") for json_text in found]


@given(st.lists(st.sampled_from(PIECES), max_size=10), st.lists(st.integers(0, 60), max_size=5))
def test_it_ends_where_the_parser_says(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces) + "\n</parameter>"
    cuts = [min(cut, len(text)) for cut in cuts]
    end = end_of(text, cuts)
    if end is not None:
        value = text[:end].removesuffix("</parameter>").removesuffix("\n")
        assert argument(HEAD + text[:end] + TAIL)[0] == value
    by_letter = end_of(text, list(range(len(text))))
    if end is not None and text[:end].endswith("\n</parameter>"):
        assert by_letter == end, "however the text is cut"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\n</parameter>", ""),
        ("</parameter>", ""),
        ("a\n</parameter>", "a"),
        ("a</parameter> b\n</parameter>", "a</parameter> b"),
        ("a\n</parameter", None),
        ("a\n</parameters>\n</parameter>", "a\n</parameters>"),
        (PIECES[-1] + "</parameter>", PIECES[-1].removesuffix("\n")),
    ],
)
def test_ends(text: str, value: str | None) -> None:
    end = end_of(text, [])
    assert (None if end is None else text[:end]) == (None if value is None else text)


def test_missing_closers_end_it_where_the_parser_says() -> None:
    text = "a\n<parameter=y>\nb"
    assert end_of(text, []) == len("a\n")
    assert end_of("a\n</function>\n</tool_call>\n<tool_call>\n", []) == len("a\n")
