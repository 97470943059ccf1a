"""Chat Completions bodies -> core.Request."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.api import chat
from kslserve.api.chat_messages import CONTENT_OMITTED, IMAGE_OMITTED
from kslserve.core.request import Message, Request, ResponseFormat, Role, ToolCall, ToolChoice
from kslserve.core.sampling import SamplingParams
from kslserve.errors import InvalidRequest, UnsupportedParameter

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=20)
TOOL = {
    "type": "function",
    "function": {"name": "ls", "description": "list", "parameters": {"type": "object"}},
}


def parse(**fields: Any) -> Request:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return chat.parse(orjson.dumps(body), DEFAULTS)


def message(**fields: Any) -> Message:
    return parse(messages=[fields]).messages[0]


def test_a_plain_request_takes_the_defaults() -> None:
    request = parse()
    assert request.model == "m"
    assert request.messages == (Message(Role.USER, "hi"),)
    assert request.sampling == DEFAULTS
    assert request.max_tokens is None
    assert request.thinking is None
    assert request.effort is None
    assert not request.stream
    assert request.parallel_tool_calls


def test_null_is_absent_everywhere() -> None:
    names = [
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "tools",
        "tool_choice",
        "n",
        "parallel_tool_calls",
        "response_format",
        "reasoning_effort",
        "chat_template_kwargs",
        "enable_thinking",
        "logprobs",
        "top_logprobs",
        "audio",
        "modalities",
        "web_search_options",
        "priority",
        "logit_bias",
        "ignore_eos",
        "preserve_thinking",
    ]
    assert parse(**dict.fromkeys(names)) == parse()


def test_unknown_and_ignored_fields() -> None:
    ignored = {"store": 7, "metadata": [], "user": {}, "x_new": 1, "prompt_cache_key": 3}
    assert parse(**ignored, service_tier=[], verbosity=0) == parse()


def test_sampling_fields() -> None:
    request = parse(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, presence_penalty=1, frequency_penalty=-1,
        repetition_penalty=1.1, seed=-5, logit_bias={"17": -100, "3": 2.5},
    )  # fmt: skip
    assert request.sampling == SamplingParams(
        temperature=0.0, top_p=0.5, top_k=0, min_p=0.1, presence_penalty=1.0,
        frequency_penalty=-1.0, repetition_penalty=1.1, seed=-5,
        logit_bias=((17, -100.0), (3, 2.5)),
    )  # fmt: skip


def test_output_limits() -> None:
    assert parse(max_tokens=5).max_tokens == 5
    assert parse(max_completion_tokens=6).max_tokens == 6
    assert parse(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert parse(max_tokens=10**9).max_tokens == 10**9


def test_stop() -> None:
    assert parse(stop="x").stop == ("x",)
    assert parse(stop=["a", "", "b", "a"]).stop == ("a", "b")
    assert parse(stop=[]).stop == ()


def test_logprobs() -> None:
    assert parse(logprobs=True).sampling.logprobs == 0
    assert parse(logprobs=True, top_logprobs=3).sampling.logprobs == 3
    assert parse(logprobs=False, top_logprobs=0).sampling.logprobs is None


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({"reasoning_effort": "none"}, False, "none"),
        ({"reasoning_effort": "minimal"}, None, "minimal"),
        ({"reasoning": {"effort": "high"}}, None, "high"),
        ({"enable_thinking": False}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"chat_template_kwargs": {"reasoning_effort": "low"}}, None, "low"),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True, "none"),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, True, None),
        ({"thinking": True, "reasoning": "on"}, None, None),
    ],
)
def test_thinking_and_effort(
    fields: dict[str, Any], thinking: bool | None, effort: str | None
) -> None:
    request = parse(**fields)
    assert (request.thinking, request.effort) == (thinking, effort)


def test_template_variables() -> None:
    kwargs = {"preserve_thinking": False, "add_vision_id": True, "x": "y", "gone": None}
    request = parse(chat_template_kwargs=kwargs)
    assert request.preserve_thinking is False
    assert request.template_vars == {"add_vision_id": True, "x": "y"}
    assert parse(preserve_thinking=True, chat_template_kwargs=kwargs).preserve_thinking is True


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        (["a", "b"], "ab"),
        ([{"type": "text", "text": "a"}, {"text": "b"}], "ab"),
        ([{"type": "image_url", "image_url": {"url": "data:x"}}], IMAGE_OMITTED),
        ([{"type": "text", "text": "see "}, {"type": "input_audio"}], "see " + CONTENT_OMITTED),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_content(content: Any, text: str) -> None:
    assert message(role="user", content=content) == Message(Role.USER, text)


def test_roles() -> None:
    roles = ["system", "developer", "user", "assistant", "tool", "function"]
    parsed = parse(messages=[{"role": role} for role in roles]).messages
    assert [m.role for m in parsed] == [
        Role.SYSTEM, Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.TOOL,
    ]  # fmt: skip
    assert message(role="tool", content="r", tool_call_id="c1").call_id == "c1"


def test_assistant_history() -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":2}'}},
        {"id": "c2", "function": {"name": "g", "arguments": {"x": 1}}},
        {"function": {"name": "h", "arguments": '{"cut'}},
        {"id": "c4", "function": {"name": "i", "arguments": "[1]"}},
        {"id": "c5", "function": {"name": "j", "arguments": ""}},
        {"id": "c6", "function": {"name": "k"}},
    ]
    parsed = message(
        role="assistant", content=None, refusal=None, reasoning_content="why", tool_calls=calls
    )
    assert parsed.reasoning == "why"
    assert parsed.tool_calls == (
        ToolCall("c1", "f", {"b": 1, "a": 2}),
        ToolCall("c2", "g", {"x": 1}),
        ToolCall("", "h", {"arguments": '{"cut'}),
        ToolCall("c4", "i", {"arguments": [1]}),
        ToolCall("c5", "j", {}),
        ToolCall("c6", "k", {}),
    )
    assert list(parsed.tool_calls[0].arguments) == ["b", "a"]
    assert message(role="assistant", reasoning="r").reasoning == "r"
    assert message(role="assistant", reasoning={"x": 1}).reasoning is None
    legacy = message(role="assistant", function_call={"name": "f", "arguments": "{}"})
    assert legacy.tool_calls == (ToolCall("", "f", {}),)


def test_tools_are_kept_as_passed() -> None:
    request = parse(tools=[{**TOOL, "strict": True}])
    assert request.tools[0].name == "ls"
    assert request.tools[0].definition == {**TOOL, "strict": True}
    assert request.tools[0].parameters == {"type": "object"}
    assert parse(tools=[]).tools == ()
    assert parse(tools=[{"type": "function", "function": {"name": "f"}}]).tools[0].parameters == {}


def test_hosted_tools_are_not_offered() -> None:
    hosted = [{"type": "web_search"}, {"type": "builtin_function", "function": {"name": "$web"}}]
    ls = {"type": "function", "function": {"name": "ls"}}
    assert parse(tools=[*hosted, ls]) == parse(tools=[ls])
    assert parse(tools=hosted) == parse()
    for choice in ("required", {"type": "web_search"}):
        assert parse(tools=hosted, tool_choice=choice).tool_choice is ToolChoice.AUTO


def test_tool_choice() -> None:
    def choice(value: Any) -> tuple[ToolChoice, str | None]:
        request = parse(tools=[TOOL], tool_choice=value)
        return request.tool_choice, request.tool_name

    assert choice(None) == (ToolChoice.AUTO, None)
    assert choice("auto") == (ToolChoice.AUTO, None)
    assert choice("none") == (ToolChoice.NONE, None)
    assert choice("required") == (ToolChoice.REQUIRED, None)
    named = {"type": "function", "function": {"name": "ls"}}
    assert choice(named) == (ToolChoice.NAMED, "ls")
    assert parse(tool_choice="none").tool_choice is ToolChoice.NONE


def test_allowed_tools() -> None:
    other = {"type": "function", "function": {"name": "cat"}}

    def choice(*tools: Any, flat: bool = False, **fields: Any) -> tuple[ToolChoice, Any]:
        inner = {**fields, "tools": list(tools)}
        value = inner if flat else {"allowed_tools": inner}
        request = parse(tools=[TOOL, other], tool_choice={"type": "allowed_tools", **value})
        assert [tool.name for tool in request.tools] == ["ls", "cat"], "the prompt has all of them"
        allowed = request.allowed_tools
        shown = {tool.name for tool in request.callable_tools}
        assert allowed is None or shown == allowed
        return request.tool_choice, allowed

    ls = {"type": "function", "function": {"name": "ls"}}
    assert choice(ls, mode="auto") == (ToolChoice.AUTO, {"ls"})
    assert choice(ls) == (ToolChoice.AUTO, {"ls"})
    assert choice(ls, flat=True) == (ToolChoice.AUTO, {"ls"})
    assert choice(ls, other, mode="required") == (ToolChoice.REQUIRED, {"ls", "cat"})
    assert choice(mode="auto") == (ToolChoice.NONE, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 2}, "n"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"stop": [str(i) for i in range(17)]}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "logit_bias.1"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a>b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 3}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": 1}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": []},
                }
            },
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}},
            "tool_choice.mode",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "function": {"name": "rm"}}],
                }
            },
            "tool_choice.tools[0].function.name",
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice.function.name",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": 1},
                }
            },
            "response_format.json_schema.strict",
        ),
        ({"thinking": {"budget_tokens": "x"}}, "thinking.budget_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"x": []}}, "chat_template_kwargs.x"),
        ({"priority": 2**40}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"audio": {}},
        {"web_search_options": {}},
        {"modalities": ["audio"]},
        {"functions": []},
        {"tools": [{"type": "custom"}]},
    ],
)
def test_what_cannot_be_done_is_said(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter):
        parse(**fields)


def test_response_format() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    inner = {"name": "n", "schema": schema, "strict": True}
    found = parse(response_format={"type": "json_schema", "json_schema": inner}).response_format
    assert found == ResponseFormat(schema, True, "response_format.json_schema.schema")
    flat = parse(response_format={"type": "json_schema", "schema": schema}).response_format
    assert flat == ResponseFormat(schema, False, "response_format.schema")
    assert parse(response_format={"type": "json_object"}).response_format == ResponseFormat()
    for text in ({"type": "text"}, {}, None):
        assert parse(response_format=text).response_format is None


def test_strict_tools_and_the_reasoning_budget() -> None:
    def tool(**more: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", **more}}

    tools = parse(tools=[tool(strict=True), tool(strict=False), tool(strict=None), tool()]).tools
    assert [entry.strict for entry in tools] == [True, False, False, False]
    assert parse(thinking={"type": "enabled", "budget_tokens": 9}).reasoning_budget == 9
    assert parse().reasoning_budget is None


KEYS = st.sampled_from(["type", "text", "function", "name", "x"])
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(-9, 9)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "function", "name", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        "messages",
        "stream",
        "stop",
        "tools",
        "tool_choice",
        "seed",
        "n",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "max_tokens",
        "top_k",
        "temperature",
        "response_format",
        "chat_template_kwargs",
        "reasoning",
        "thinking",
        "modalities",
        "priority",
        "stream_options",
    ]
)


@given(st.dictionaries(NAMES, JSON_VALUES, max_size=4))
def test_any_body_parses_or_is_a_400(fields: dict[str, Any]) -> None:
    refusal = None
    try:
        assert parse(**fields).messages
    except InvalidRequest as error:
        refusal = error
    assert refusal is None or (refusal.status == 400 and str(refusal).endswith("."))
