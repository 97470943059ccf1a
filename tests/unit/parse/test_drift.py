"""Output that strays from the format in the ways that served models do (tests/data/drift.json):
each with outputs that are calls, and with prose that looks like one and must stay prose.

Refused on purpose:

- Anything that the token limit cut off: what a half-written call would do, nobody asked for. Only
  where the model itself ended its turn are closers supplied.
- Bare JSON with text behind it, or inside a line: prose about calls looks so.
- A scalar behind a long unescaped text is a member of its own only if its name and value are plain;
  else the text may run too far, and the client sees it.
- Names of parameters in another spelling (filePath for file_path): guessing could hit another tool.
- `<result>` blocks: results that the model made up are no calls, nor is anything inside them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kslserve.core.usage import FinishReason
from kslserve.parse.head import Family
from kslserve.parse.stream import OutputParser
from tests.unit.parse.parse_support import Output, collect, cut, parse, specs

DATA = json.loads((Path(__file__).parents[2] / "data" / "drift.json").read_text(encoding="utf-8"))
TOOLS = specs(DATA["tools"])
CALLS = [
    pytest.param(
        entry["text"], entry["calls"], entry.get("family", drift["family"]), id=drift["id"]
    )
    for drift in DATA["drifts"]
    for entry in drift["calls"]
]
PROSE = [pytest.param(text, id=drift["id"]) for drift in DATA["drifts"] for text in drift["prose"]]


def every_way(text: str, **options: Any) -> Output:
    """Parse at once, by character and at random cuts; all agree."""
    whole = parse([text], TOOLS, **options)
    dice = random.Random(text)
    cuts = [
        list(text),
        *(cut(text, dice.choices(range(len(text) + 1), k=3)) for _ in range(8)),
    ]
    for pieces in cuts:
        assert parse(pieces, TOOLS, **options).merged == whole.merged, pieces
    return whole


def families(text: str) -> list[str]:
    parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id")
    for letter in text:
        parser.feed(letter)
    parser.finish(FinishReason.STOP)
    return parser.recoveries


def test_every_drift_has_both_sides() -> None:
    assert [drift["id"] for drift in DATA["drifts"]] == [f"Q22.{n}" for n in range(1, 23)]
    assert all(drift["calls"] and drift["prose"] for drift in DATA["drifts"])
    assert {entry.values[2] for entry in CALLS} == {family.value for family in Family}


@pytest.mark.parametrize(("text", "calls", "family"), CALLS)
def test_call(text: str, calls: list[list[Any]], family: str) -> None:
    output = every_way(text)
    assert [list(call) for call in output.arguments()] == calls
    assert families(text)[0] == family
    assert len(families(text)) == len(calls)
    assert all(call.ended for call in output.calls)
    assert "{" not in output.content
    assert "<" not in output.content


@pytest.mark.parametrize("text", PROSE)
def test_prose(text: str) -> None:
    output = every_way(text)
    assert output.calls == []
    assert output.content == text
    assert families(text) == []


@pytest.mark.parametrize(("text", "calls", "family"), CALLS)
def test_calls_in_a_fence_are_prose_and_calls_behind_it_are_not(
    text: str, calls: list[list[Any]], family: str
) -> None:
    quoted = f"```\n{text}\n```\n"
    assert every_way(quoted).calls == []
    behind = every_way(f"Look:\n{quoted}\n{text}")
    assert [list(call) for call in behind.arguments()] == calls


@pytest.mark.parametrize(("text", "calls", "family"), CALLS)
def test_recovery_can_be_switched_off(text: str, calls: list[list[Any]], family: str) -> None:
    if "<tool_call>" in text:
        return  # behind its wrapper a call is one, whatever its form
    parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id", recover=False)
    output = collect(parser.feed(text) + parser.finish(FinishReason.STOP))
    assert output.calls == []
    assert output.content == text


@pytest.mark.parametrize(("text", "calls", "family"), CALLS)
def test_nothing_is_made_up_where_the_output_was_cut_off(
    text: str, calls: list[list[Any]], family: str
) -> None:
    """Whatever the limit left of a call begins like the call."""
    dice = random.Random(text)
    for end in dice.sample(range(len(text)), min(len(text), 12)):
        output = every_way(text[:end], reason=FinishReason.LENGTH)
        for call, (name, arguments) in zip(output.calls, calls, strict=False):
            assert call.name == name
            if call.ended:
                assert json.loads(call.json) == arguments


def test_text_of_a_recovery_is_kept_if_asked() -> None:
    text = '{"name": "Read", "arguments": {"file_path": "a.py"}}'
    bare = "<function=Read>\n<parameter=file_path>\na\n</parameter>\n</function>"
    for pieces in ([f"Now.\n{text}\n{bare}"], list(f"Now.\n{text}\n{bare}")):
        parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id", keep_text=True)
        for piece in pieces:
            parser.feed(piece)
        parser.finish(FinishReason.STOP)
        kept = [(recovery.family, "".join(recovery.pieces)) for recovery in parser.recovered]
        assert kept == [("json", text), ("bare_function", bare)]


def test_well_formed_calls_are_no_recoveries() -> None:
    call = "<tool_call>\n<function=Read>\n<parameter=file_path>\na\n</parameter>\n</function>\n"
    assert families(f"{call}</tool_call>\n{call}</tool_call>") == []


def test_a_lost_opener_is_recovered_before_the_first_call_only() -> None:
    call = "<tool_call>\n<function=Read>\n<parameter=file_path>\na\n</parameter>\n</function>\n"
    rest = 'Read", "arguments": {"file_path": "a.py"}}'
    assert len(every_way(f"{call}</tool_call>\n{rest}").calls) == 1
    assert len(every_way(f"{rest}\n{call}</tool_call>").calls) == 2


def test_an_undeclared_opener_ends_inference() -> None:
    listed = "<parameter=pattern>\n*.py\n</parameter>\n</function>"
    assert len(every_way(listed).calls) == 1
    assert every_way(f"<function=Nope>\n{listed}\n{listed}").calls == []


def test_a_result_closed_earlier_does_not_veto() -> None:
    text = '{"name": "Read", "arguments": {"file_path": "a.py"}}'
    assert len(every_way(f"<result>\nold\n</result>\n{text}").calls) == 1
    assert every_way(f"<result>\nold\n{text}").calls == []


def test_held_text_is_bounded() -> None:
    for begin in (
        '{"name": "Read", "arguments": {"file_path": "',
        "<parameter=file_path>\n",
        'Read", "arguments": {"file_path": "',
    ):
        parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id")
        events = parser.feed(begin)
        for _ in range(60):
            events += parser.feed("a" * 5000)
        assert len(collect(events).content) > 250_000


def test_damaged_objects_are_read_in_linear_time() -> None:
    """Each of these ran for minutes with a pattern that reads white space twice."""
    begin = '{"name": "Write", "arguments": {"content": "a "b" '
    for middle in ("}" + "\n" * 60_000, '"}' + " " * 60_000, "</content>" + "\n" * 60_000):
        for _ in range(2):
            assert parse([begin + middle + "x"], TOOLS).calls == []
            middle = middle[:30_000] * 2


def test_json_that_names_no_tool_is_not_held() -> None:
    for text in ('{"name": "Bob", ', '{"type": "object", ', '{"tool": "hammer", ', '{"a": ', "{ x"):
        parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id")
        assert collect(parser.feed(text)).content == text


READ = '{"name": "Read", "arguments": {"file_path": "a.py"}}'


def test_an_undeclared_tool_ends_inference_of_every_kind() -> None:
    listed = "<parameter=pattern>\n*.py\n</parameter>\n</function>"
    keyed = '{"name": {"pattern": "*.py"}}'
    wrapped = f"<tool_call>\n<function=Nope>\n{listed}\n</tool_call>"
    for guessed in (listed, keyed):
        assert [call.name for call in every_way(guessed).calls] == ["Glob"]
        assert [call.name for call in every_way(f"{wrapped}\n{guessed}").calls] == ["Nope"]
        assert every_way(f"<function=Nope>\n{guessed}").calls == []


def test_quoted_text_is_not_held() -> None:
    for text in ('{"name": "Read", "arg', 'Read", "arguments": {"a', "<parameter=file_path>\nabc"):
        for quote in ("```\n", "<result>\n"):
            parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id")
            seen = collect(event for letter in quote + text for event in parser.feed(letter))
            assert seen.content == quote + text


def test_a_damaged_text_ends_before_the_next_call() -> None:
    first = '{"name": "Write", "arguments": {"file_path": "a", "content": "say "hi" now"}}'
    wrapped = f"<tool_call>\n{first}\n</tool_call>\n<tool_call>\n{READ}\n</tool_call>"
    for text in (wrapped, f"{first}\n{READ}"):
        assert [list(call) for call in every_way(text).arguments()] == [
            ["Write", {"file_path": "a", "content": 'say "hi" now'}],
            ["Read", {"file_path": "a.py"}],
        ]


def test_a_scalar_behind_a_damaged_text_is_a_member() -> None:
    text = '{"name": "Write", "arguments": {"content": "say "hi"", "limit": 5, "all": true}}'
    assert every_way(text).arguments() == [
        ("Write", {"content": 'say "hi"', "limit": 5, "all": True})
    ]


def test_fences_go_on_around_calls() -> None:
    call = "<tool_call>\n<function=Read>\n<parameter=file_path>\na\n</parameter>\n</function>\n"
    assert len(every_way(f"```\n{call}</tool_call>\n```\n{READ}").calls) == 2
    assert len(every_way(f"```\n{call}</tool_call>\n{READ}\n```").calls) == 1
    assert len(every_way(f"some ```{call}</tool_call>\n```\n{READ}\n```").calls) == 1


def test_reasoning_is_not_searched_for_drift() -> None:
    for text in (READ, f"plan\n{READ}", "<parameter=pattern>\n*\n</parameter>\n</function>"):
        output = every_way(text, thinking=True)
        assert (output.calls, output.reasoning) == ([], text)
        assert len(every_way(f"plan\n</think>\n\n{READ}", thinking=True).calls) == 1
