"""The shared cases of reported faults, each with every way of cutting its output into pieces."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kslserve.parse.stream import OutputParser
from tests.runners.files import named
from tests.runners.parser_cases import run_parser, run_stop
from tests.unit.parse.parse_support import specs

PARSER_CASES = named(
    "parser_framing",
    "parser_whitespace",
    "parser_types",
    "parser_malformed",
    "parser_reasoning",
    "parser_truncation",
)


@pytest.mark.parametrize("case", PARSER_CASES, ids=lambda case: case["id"])
def test_case(case: dict[str, Any]) -> None:
    run_parser(case)


@pytest.mark.parametrize("case", named("stop"), ids=lambda case: case["id"])
def test_stop_case(case: dict[str, Any]) -> None:
    run_stop(case)


def test_a_case_that_does_not_hold_fails() -> None:
    wrong = copy.deepcopy(PARSER_CASES[0])
    wrong["expect"]["content"] = "something else"
    with pytest.raises(AssertionError):
        run_parser(wrong)
    held = next(case for case in PARSER_CASES if "stream" in case)
    with pytest.raises(AssertionError, match="fragments"):
        run_parser({**held, "stream": {"min_argument_fragments": 10**6}})
    wrong = copy.deepcopy(named("stop")[0])
    wrong["expect"]["text"] += "x"
    with pytest.raises(AssertionError):
        run_stop(wrong)


def test_string_arguments_stream() -> None:
    tools = specs(PARSER_CASES[0]["tools"])
    parser = OutputParser(tools, thinking=False, make_id=lambda: "call")
    parser.feed("<tool_call>\n<function=run_cmd>\n<parameter=command>\n")
    assert collect_json(parser, "echo") == '{"command": "echo'
    assert collect_json(parser, ' "a"\n') == ' \\"a\\"'
    assert collect_json(parser, "b") == "\\nb"


def collect_json(parser: OutputParser, piece: str) -> str:
    return "".join(event.json for event in parser.feed(piece))  # type: ignore[union-attr]
