"""Arguments of free-form tools -> their text, whatever the cuts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.api.responses_calls import FreeText


def read(pieces: list[str]) -> tuple[str, list[str]]:
    free = FreeText()
    deltas = [free.feed(piece) for piece in pieces]
    deltas.append(free.finish())
    return "".join(deltas), deltas


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


TEXTS = st.text(st.characters(codec="utf-8") | st.sampled_from('"\\\n\U0001f600u'))


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 10**6), max_size=8))
def test_any_text_at_any_cut(text: str, ascii_only: bool, places: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert read(cut(arguments, places))[0] == text
    assert read(list(arguments))[0] == text


def test_text_comes_as_it_is_written() -> None:
    _, deltas = read(['{"input": "a', "b\\", "nc\\ud83d", '\\ude00d"', "}"])
    assert deltas == ["a", "b", "\nc", "\U0001f600d", "", ""]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{}", ""),
        ('{"patch": "p"}', "p"),
        ('{"patch": "p", "input": "q"}', "q"),
        ('{"input": "q", "more": 1}', "q"),
        ('{"a": "p", "b": "q"}', '{"a": "p", "b": "q"}'),
        ('{"input": 3}', '{"input": 3}'),
        ('{"input": "lone \\ud800."}', "lone \ufffd."),
        ('{"input": "lone \\ud800\\n"}', "lone \ufffd\n"),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut"),
        ('{"other": "cut', '{"other": "cut'),
        ("", ""),
    ],
)
def test_other_shapes(arguments: str, text: str) -> None:
    assert read([arguments])[0] == text
    assert read(list(arguments))[0] == text
