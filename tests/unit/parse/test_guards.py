"""What the surroundings of a place say: fences, code spans, made-up results, line starts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.parse.guards import Surroundings
from tests.unit.parse.parse_support import cut


def after(pieces: list[str]) -> tuple[bool, bool]:
    """(may a call be recovered, does a line start) behind the pieces"""
    surroundings = Surroundings()
    for piece in pieces:
        surroundings.took(piece)
    return surroundings.open(), surroundings.starts_line


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("", True),
        ("text\n", True),
        ("```\n", False),
        ("```python\ncode\n", False),
        ("```\ncode\n```\n", True),
        ("```\ncode\n``\n", False),
        ("```\ncode\n``` x\n", False),
        ("````\n```\n", False),
        ("````\n```\n`````  \n", True),
        ("~~~\n```\n", False),
        ("~~~ `x`\n", False),
        ("~~~\n~~~\n", True),
        ("   ```\n", False),
        ("    ```\n", False),  # an odd number of ticks: a span that is open
        ("    ```\n\n", True),
        ("text ```\n", False),
        ("text ```\n\n", True),
        ("``` a ` b\n", True),  # two marks of a span, no fence
        ("`a\n", False),
        ("`a`\n", True),
        ("``a`b``\n", False),
        ("`a\nb`\n", True),
        ("`a\n \t\n", True),
        ("`a\n\n`b\n", False),
        ("\n\n`a` `b\n", False),
        ("<result>\n", False),
        ("<result>\n</result>\n", True),
        ("<result><result></result>\n", False),
        ("<tool_response id='1'>\n", False),
        ("<output>x</output> <results>\n", False),
        ("</result><resulting>\n", True),
        ("```\n<result>\n```\n", True),
        ("1 < 2 <b> ~ ~~~\n", True),
    ],
)
def test_open(text: str, is_open: bool) -> None:
    assert after([text])[0] is is_open
    assert after(list(text))[0] is is_open


@pytest.mark.parametrize(
    ("text", "starts"),
    [("", True), ("  ", True), ("a\n   ", True), ("    ", False), ("a\n\t", False), ("a ", False)],
)
def test_starts_line(text: str, starts: bool) -> None:
    assert after(list(text))[1] is after([text])[1] is starts


def test_a_call_ends_the_line() -> None:
    surroundings = Surroundings()
    surroundings.took("```\nsome ")
    surroundings.end_line()
    assert surroundings.starts_line
    assert not surroundings.open()
    surroundings.took("```")
    surroundings.end_line()
    surroundings.end_line()
    assert surroundings.open()


MARKS = st.sampled_from(
    ["`", "```", "~~~", "\n", "\n", " ", "a", "<result>", "</result>", "<", "\t"]
)


@given(st.lists(MARKS, max_size=30).map("".join), st.lists(st.integers(0, 100), max_size=8))
def test_cuts_do_not_matter(text: str, places: list[int]) -> None:
    assert after([text]) == after(list(text)) == after(cut(text, places))
