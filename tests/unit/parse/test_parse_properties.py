"""Properties of the output parser over wide inputs: any text, any cuts."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kslserve.core.usage import FinishReason
from tests.unit.parse.parse_support import cut, parse, spec, strings

TOOLS = (
    strings("write", "path", "content"),
    spec(
        "run",
        {
            "type": "object",
            "properties": {
                "n": {"type": "integer"},
                "list": {"type": "array"},
                "note": {"type": ["string", "null"]},
                "any": {},
            },
        },
    ),
    spec("bare"),
)
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<function=write>",
    "<function=run>",
    "<function=bare>",
    "<function=other>",
    '<function name="run">',
    "</function>",
    "</function_call>",
    "<parameter=path>",
    "<parameter=content>",
    "<parameter=n>",
    "<parameter=list>",
    "<parameter=note>",
    "<parameter=any>",
    "<parameter=arguments>",
    "<parameter=x",
    "<parameter=>",
    "</parameter>",
    "<think>",
    "</think>",
    "<write>",
    "</write>",
    "write>",
    '{"name": "run", "arguments": {"n": 1, "k": [NaN]}}',
    '{"path": "a", "content": "\\"}"}',
    "{",
    "}",
    '"',
    "\\",
    "null",
    "[1, 2]",
    "\n",
    "\n\n",
    " ",
    " " * 70,
    "<",
    "a",
    "text",
)
TEXT = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=4)), max_size=24).map("".join)
REASON = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP_STRING])
PLACES = st.lists(st.integers(0, 10_000), max_size=12)


@settings(max_examples=400, deadline=None)
@given(TEXT, PLACES, REASON, st.booleans())
def test_cuts_do_not_matter(
    text: str, places: list[int], reason: FinishReason, thinking: bool
) -> None:
    whole = parse([text], TOOLS, thinking=thinking, reason=reason)
    assert parse(list(text), TOOLS, thinking=thinking, reason=reason).merged == whole.merged
    assert parse(cut(text, places), TOOLS, thinking=thinking, reason=reason).merged == whole.merged


@settings(max_examples=200, deadline=None)
@given(TEXT, REASON)
def test_no_text_is_lost_without_a_call(text: str, reason: FinishReason) -> None:
    got = parse(list(text), TOOLS, reason=reason)
    if not got.calls:
        assert got.content == text
    assert parse(list(text), (), reason=reason).content == text
    assert parse([text], TOOLS, tools_enabled=False, reason=reason).content == text


@settings(max_examples=200, deadline=None)
@given(TEXT, PLACES)
def test_reasoning_and_content_are_the_output(text: str, places: list[int]) -> None:
    got = parse(cut(text, places), TOOLS, thinking=True)
    if got.calls:
        return
    before, close, after = text.partition("</think>")
    openers = before.lstrip()
    while openers.startswith("<think>"):
        openers = openers.removeprefix("<think>").lstrip()
    assert got.reasoning.strip() == openers.strip()
    assert got.content.strip() == after.strip()
    assert close or not got.content


VALUE = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=30)
PIECES = st.lists(
    st.sampled_from(
        (
            "</parameter> x",
            "</function> x",
            "</tool_call> x",
            "<tool_call>",
            "<b>",
            "\n",
            "a < b",
            '"',
        )
    ),
    max_size=6,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(VALUE, VALUE | PIECES), max_size=3), VALUE, PLACES)
def test_well_formed_calls_come_back(
    calls: list[tuple[str, str]], text: str, places: list[int]
) -> None:
    rendered = [
        f"<tool_call>\n<function=write>\n<parameter=path>\n{path}\n</parameter>\n"
        f"<parameter=content>\n{content}\n</parameter>\n</function>\n</tool_call>"
        for path, content in calls
    ]
    output = "\n".join(rendered)
    if text.strip():
        output = text + ("\n\n" + output if output else "")
    got = parse(cut(output, places), TOOLS)
    want = [("write", {"path": path, "content": content}) for path, content in calls]
    assert got.arguments() == want
    assert got.content.strip() == text.strip()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | VALUE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(VALUE, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(JSON, max_size=3), st.integers(), PLACES)
def test_typed_values_come_back(items: list[Any], number: int, places: list[int]) -> None:
    output = (
        f"<tool_call>\n<function=run>\n<parameter=list>\n{json.dumps(items)}\n</parameter>\n"
        f"<parameter=n>\n{number}\n</parameter>\n</function>\n</tool_call>"
    )
    assert parse(cut(output, places), TOOLS).arguments() == [("run", {"list": items, "n": number})]
