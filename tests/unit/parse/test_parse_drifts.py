"""Output that strays from the format in known ways, and text that only looks like it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kslserve.core.events import TextDelta, ToolCallEnd
from kslserve.core.usage import FinishReason
from kslserve.parse.stream import OutputParser
from tests.unit.parse.parse_support import Output, parse, spec, strings

TOOLS = (
    strings("write_file", "path", "content"),
    strings("run_cmd", "command"),
    spec("get_time"),
    spec("count", {"type": "object", "properties": {"n": {"type": "integer"}}}),
)

ONE = {"path": "a.py", "content": "x"}


def both(text: str, **options: Any) -> Output:
    """Parse at once and by character; both agree."""
    output = parse([text], TOOLS, **options)
    assert parse(list(text), TOOLS, **options).merged == output.merged
    return output


@pytest.mark.parametrize(
    "text",
    [
        # A next parameter, or the end, where the value's closer is missing.
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n<parameter=content>\nx\n"
        "</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        "<parameter=content>\nx\n</function>\n</tool_call>",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        "<parameter=content>\nx",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        "<parameter=content>\nx\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        "<parameter=content>\nx\n</tool_call>",
        # Openers in other shapes.
        '<tool_call>\n<function name="write_file">\n<parameter name="path">\na.py\n</parameter>\n'
        '<parameter name="content" type="string">\nx\n</parameter>\n</function>\n</tool_call>',
        "<tool_call>\nwrite_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=content>\nx\n"
        "</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<write_file>\n<parameter=path>\na.py\n</parameter>\n<parameter=content>\nx\n"
        "</parameter>\n</write_file>\n</tool_call>",
        "<tool_call>\n<function=write_file\n<parameter=path\na.py\n</parameter>\n"
        "<parameter=content>\nx\n</parameter>\n</function>\n</tool_call>",
        # JSON in place of the parameters, of the function, of a parameter.
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "a.py", "content": "x"}}\n'
        "</tool_call>",
        '<tool_call>\n{"name": "write_file", "arguments": "{\\"path\\": \\"a.py\\", '
        '\\"content\\": \\"x\\"}"}\n</tool_call>',
        '<tool_call>\n<function=write_file>\n{"path": "a.py", "content": "x"}\n</function>\n'
        "</tool_call>",
        '<tool_call>\n<write_file>{"path": "a.py", "content": "x"}</write_file></tool_call>',
        "<tool_call>\n<function=write_file>\n<parameter=arguments>\n"
        '{"path": "a.py", "content": "x"}\n</parameter>\n</function>\n</tool_call>',
        # A parameter given twice, a parameter without a name.
        "<tool_call>\n<function=write_file>\n<parameter=path>\na.py\n</parameter>\n"
        "<parameter=path>\nb.py\n</parameter>\n<parameter=content>\nx\n</parameter>\n"
        "<parameter=>\ny\n</parameter>\n</function>\n</tool_call>",
    ],
)
def test_call_is_understood(text: str) -> None:
    output = both(text)
    assert output.arguments() == [("write_file", ONE)]
    assert output.content == ""
    assert all(call.ended for call in output.calls)


@pytest.mark.parametrize(
    "text",
    [
        "Use `<tool_call>` and `<function=run_cmd>` to call.",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>\n<function=",
        "<tool_call> {not json}",
        '<tool_call>\n{"name": "run_cmd", "arguments": {]}\n</tool_call> tail',
        '<tool_call>\n{"name": 3}\n</tool_call>',
        "<function=run_cmd> is how it starts",
        "<function=other>\n<parameter=x>\n1\n</parameter>\n</function>",
        "<tool_call>\n<function=...>\n</function>\n</tool_call>",
        "<tool_call>" * 20,
        "a </think> b",
    ],
)
def test_text_stays_text(text: str) -> None:
    output = both(text)
    assert output.calls == []
    assert output.content == text


@pytest.mark.parametrize(
    "value",
    [
        "see </parameter> and </function> and </tool_call>.",
        "<parameter=path>\nquoted in a line",
        "</parameter>\ntext",
        "</parameter>\n</function>\ntext",
        "</function>\n</tool_call>\ntext",
        "Example:\n<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n"
        "</tool_call>\nEnd.",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "an opener alone:\n<function=f>\n",
        "\n\nblank lines around\n\n",
        "",
        "\n",
    ],
)
@pytest.mark.parametrize("name", ["content", "undeclared"])
def test_value_may_quote_the_format(value: str, name: str) -> None:
    output = both(
        "<tool_call>\n<function=write_file>\n<parameter=path>\na\n</parameter>\n"
        f"<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )
    assert output.arguments() == [("write_file", {"path": "a", name: value})]


def test_wrapped_call_of_an_undeclared_tool_is_passed_on() -> None:
    output = both("<tool_call>\n<function=nope>\n<parameter=x>\n1\n</parameter>\n</function>\n")
    assert output.arguments() == [("nope", {"x": "1"})]


def test_two_functions_in_one_wrapper() -> None:
    output = both(
        "<tool_call>\n<function=get_time>\n</function>\n<function=count>\n<parameter=n>\n5\n"
        "</parameter>\n</function>\n</tool_call>"
    )
    assert output.arguments() == [("get_time", {}), ("count", {"n": 5})]


def test_turn_that_ends_after_the_opener_is_a_call_without_arguments() -> None:
    text = "<tool_call>\n<function=get_time>\n"
    assert both(text).arguments() == [("get_time", {})]
    assert both(text, reason=FinishReason.LENGTH).calls == []
    assert both(text, thinking=True).calls == []


def test_call_inside_reasoning_ends_it() -> None:
    output = both(
        "Look.\n\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>\nThen.\n</think>\n\nDone.",
        thinking=True,
    )
    assert output.reasoning == "Look."
    assert output.arguments() == [("get_time", {})]
    assert output.content.split() == ["Then.", "Done."]


@pytest.mark.parametrize(
    "text",
    [
        "Say <tool_call> first",
        "<tool_call>\n<function=nope>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call> x",
        "<function=run_cmd>\n<parameter=command>\nls\n</parameter>\n</function>",
        "a <think> b",
    ],
)
def test_reasoning_about_calls_is_reasoning(text: str) -> None:
    output = both(text, thinking=True)
    assert output.reasoning == text
    assert output.calls == []
    assert output.content == ""


def test_framing_line_breaks_are_no_text() -> None:
    output = both(
        "\nplan\n</think>\n\nSure.\n\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n",
        thinking=True,
    )
    assert (output.reasoning, output.content) == ("plan", "Sure.")


def test_indentation_after_reasoning_is_kept() -> None:
    assert both("</think>\n\n    code", thinking=True).content == "    code"
    assert parse(list("</think>\n\n    code"), (), thinking=True).content == "    code"


def test_tools_switched_off_make_calls_text() -> None:
    text = "<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
    assert both(text, tools_enabled=False).content == text
    output = both(f"why</think>\n\n{text}", tools_enabled=False, thinking=True)
    assert (output.reasoning, output.content) == ("why", text)


@pytest.mark.parametrize(
    ("text", "json_text", "ended"),
    [
        ("<parameter=command>\nls", '{"command": "ls', False),
        ("<parameter=command>\nls\n</parameter>", '{"command": "ls', False),
        ("<parameter=command>\nls\n</parameter>\n</function>\n", '{"command": "ls"}', True),
        ("<parameter=command>\nls\n</parameter>\n</function>\n</tool", '{"command": "ls"}', True),
        ("<parameter=command>\n", "", False),
    ],
)
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP_STRING])
def test_output_cut_off_inside_a_call(
    text: str, json_text: str, ended: bool, reason: FinishReason
) -> None:
    output = both(f"<tool_call>\n<function=run_cmd>\n{text}", reason=reason)
    (call,) = output.calls
    assert (call.json, call.ended) == (json_text, ended)


def test_typed_value_cut_off_is_not_sent() -> None:
    text = "<tool_call>\n<function=count>\n<parameter=n>\n12"
    (call,) = both(text, reason=FinishReason.LENGTH).calls
    assert call.json == ""
    assert both(text).arguments() == [("count", {"n": 12})]


def test_held_text_is_bounded() -> None:
    """Whatever comes, what is held back outside of typed values stays short."""
    for unit in ("\n", " ", "<", "<tool_call>", "</tool_call>\n", "<parameter=x", "</parameter>\n"):
        for thinking in (False, True):
            parser = OutputParser(TOOLS, thinking=thinking, make_id=lambda: "id")
            for _ in range(400):
                parser.feed(unit)
            assert len(parser._text) < 1000
        parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id")
        parser.feed("<tool_call>\n<function=run_cmd>\n<parameter=command>\n")
        for _ in range(400):
            parser.feed(unit)
        assert len(parser._text) < 1000


def test_plain_text_leaves_at_once() -> None:
    parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id")
    assert parser.feed("Hello") == [TextDelta("Hello")]
    assert parser.feed(" there") == [TextDelta(" there")]
    assert parser.feed("") == []


def test_arguments_are_strict_json_for_any_escape() -> None:
    text = (
        '<tool_call>\n{"name": "run_cmd", "arguments": {"command": "\\ud800", "\\udfff": 1e999, '
        '"ok": 1e5}}\n</tool_call>'
    )
    output = both(text)
    (call,) = output.calls
    call.json.encode()
    assert json.loads(call.json) == {"command": "\ud800", "ok": 1e5}


def test_events_of_a_call_are_complete() -> None:
    parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id")
    assert not parser.saw_tool_call
    events = parser.feed("<tool_call>\n<function=get_time>\n</function>")
    assert events[-1] == ToolCallEnd(0)
    assert parser.saw_tool_call
    assert parser.finish(FinishReason.STOP) == []


def test_in_reasoning() -> None:
    parser = OutputParser(TOOLS, thinking=True, make_id=lambda: "id")
    assert parser.in_reasoning
    parser.feed("a</think>")
    assert not parser.in_reasoning
