"""The shared cases of reported faults, each with every way of cutting its output into pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kslserve.core.request import ToolSpec
from kslserve.core.usage import FinishReason
from kslserve.parse.stream import OutputParser
from tests.unit.parse.parse_support import Output, collect, cut, load_cases, parse, specs

PARSER_CASES = load_cases(
    "parser_framing",
    "parser_whitespace",
    "parser_types",
    "parser_malformed",
    "parser_reasoning",
    "parser_truncation",
)
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def cuts_of(case: dict[str, Any]) -> list[list[str]]:
    whole = "".join(case["chunks"])
    dice = random.Random(case["id"])
    cuts = [case["chunks"], [whole], list(whole)]
    cuts += [
        cut(whole, dice.sample(range(len(whole)), min(len(whole), n))) for n in (1, 2, 3, 5, 9, 20)
    ]
    return cuts


def text_fits(want: Any, got: str) -> bool:
    if isinstance(want, dict):
        if "exact" in want:
            return got == want["exact"]
        return "any" in want or all(part in got for part in want["contains"])
    return got.strip() == (want or "").strip()


def equal(left: Any, right: Any) -> bool:
    """JSON equality: true is not 1, 5 is 5.0."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


def fits(case: dict[str, Any], expect: dict[str, Any], got: Output) -> bool:
    finish = "length" if case["end"] == "length" else "tool_calls" if got.calls else "stop"
    if not text_fits(expect["reasoning"], got.reasoning) or not text_fits(
        expect["content"], got.content
    ):
        return False
    if finish != expect["finish_reason"]:
        return False
    if "incomplete_call" in case:
        return incomplete_fits(case["incomplete_call"], got)
    calls = [{"name": name, "arguments": arguments} for name, arguments in got.arguments()]
    return equal(calls, expect["tool_calls"])


def incomplete_fits(want: dict[str, Any], got: Output) -> bool:
    """No call, or one whose arguments begin with (a beginning of) what is given."""
    if not got.calls:
        return True
    (call,) = got.calls
    if call.name != want["name"]:
        return False
    values = json.loads(close_json(call.json))
    return all(
        key in want["arguments"]
        and (equal(value, want["arguments"][key]) or want["arguments"][key].startswith(value))
        for key, value in values.items()
    )


def close_json(text: str) -> str:
    """Complete the beginning of an object of strings."""
    for end in ("", "}", '"}', "{}"):
        try:
            json.loads(text + end)
        except ValueError:
            continue
        return text + end
    raise AssertionError(f"not the beginning of an object: {text}")


@pytest.mark.parametrize("case", PARSER_CASES, ids=lambda case: case["id"])
def test_case(case: dict[str, Any]) -> None:
    outcomes = [case["expect"], *({**case["expect"], **other} for other in case.get("accept", ()))]
    results = []
    for pieces in cuts_of(case):
        got = parse(
            pieces, specs(case["tools"]), thinking=case["thinking"], reason=REASONS[case["end"]]
        )
        assert any(fits(case, expect, got) for expect in outcomes), got
        results.append(got.merged)
    assert all(result == results[0] for result in results)


STREAM_CASES = [case for case in PARSER_CASES if "stream" in case]


@pytest.mark.parametrize("case", STREAM_CASES, ids=lambda case: case["id"])
def test_text_is_seen_before_the_last_chunk(case: dict[str, Any]) -> None:
    parser = OutputParser(specs(case["tools"]), thinking=case["thinking"], make_id=lambda: "call")
    seen = collect(event for piece in case["chunks"][:-1] for event in parser.feed(piece))
    for text in case["stream"].get("content_seen_before_last_chunk", ()):
        assert text in seen.content


def test_string_arguments_stream() -> None:
    tools: tuple[ToolSpec, ...] = specs(PARSER_CASES[0]["tools"])
    parser = OutputParser(tools, thinking=False, make_id=lambda: "call")
    parser.feed("<tool_call>\n<function=run_cmd>\n<parameter=command>\n")
    assert collect_json(parser, "echo") == '{"command": "echo'
    assert collect_json(parser, ' "a"\n') == ' \\"a\\"'
    assert collect_json(parser, "b") == "\\nb"


def collect_json(parser: OutputParser, piece: str) -> str:
    return "".join(event.json for event in parser.feed(piece))  # type: ignore[union-attr]
