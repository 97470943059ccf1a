"""Responses bodies -> core.Request."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.api import responses
from kslserve.api.chat_messages import IMAGE_OMITTED
from kslserve.api.responses_reasoning import seal
from kslserve.core.request import Message, ResponseFormat, Role, ToolCall, ToolChoice
from kslserve.errors import InvalidRequest, UnsupportedParameter
from tests.unit.api.responses_support import AGENTS, DEFAULTS, LS, PATCH, SEARCH, parse

USER = Message(Role.USER, "hi")


def items(*values: Any, **fields: Any) -> tuple[Message, ...]:
    return parse(input=list(values), **fields).messages


def call(call_id: str, name: str = "ls", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        **more,
    }


def output(call_id: str, text: Any = "out", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": call_id, "output": text}


def said(text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text}],
    }


def thought(text: str = "why", **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **more}


def test_a_plain_request_takes_the_defaults() -> None:
    request = parse()
    assert request.messages == (USER,)
    assert request.sampling == DEFAULTS
    assert request.max_tokens is None
    assert request.thinking is None
    assert request.tools == ()
    assert request.parallel_tool_calls
    assert not request.stream


def test_fields() -> None:
    request = parse(
        stream=True, temperature=0, top_p=0.5, max_output_tokens=9, parallel_tool_calls=False,
        reasoning={"effort": "high", "summary": "auto", "context": "all_turns"}, priority=-3,
        instructions="be brief", seed=4, stop=["x"],
    )  # fmt: skip
    assert request.stream
    assert (request.sampling.temperature, request.sampling.top_p) == (0.0, 0.5)
    assert request.sampling.seed == 4
    assert request.max_tokens == 9
    assert not request.parallel_tool_calls
    assert request.effort == "high"
    assert request.priority == -3
    assert request.stop == ("x",)
    assert request.messages == (Message(Role.SYSTEM, "be brief"), USER)
    assert parse(reasoning={"effort": "none"}).thinking is False


def test_ignored_fields() -> None:
    ignored = {
        "store": True, "client_metadata": 3, "metadata": [], "user": {}, "truncation": 1,
        "service_tier": [], "context_management": {}, "stream_options": 7, "safety_identifier": 1,
        "prompt_cache_key": [], "include": ["reasoning.encrypted_content", "new"], "x_new": 1,
        "background": False, "text": {"verbosity": "low", "format": {"type": "text"}},
        "previous_response_id": None,
    }  # fmt: skip
    request = parse(**ignored)
    assert request.messages == (USER,)
    assert request.sampling == DEFAULTS


def test_text_format_and_strict_tools() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "out", "schema": schema, "strict": True}
    found = parse(text={"format": form})
    assert found.response_format == ResponseFormat(schema, True, "text.format.schema")
    assert found.echo["text"]["format"] == form
    assert parse(text={"format": {"type": "text"}}).response_format is None
    names = [("a", True), ("b", False), ("c", None)]
    tools = [{"type": "function", "name": name, "strict": strict} for name, strict in names]
    assert [tool.strict for tool in parse(tools=tools).tools] == [True, False, False]


def test_logprobs() -> None:
    assert parse(top_logprobs=0).sampling.logprobs is None
    assert parse(top_logprobs=3).sampling.logprobs == 3
    assert parse(include=["message.output_text.logprobs"]).sampling.logprobs == 0


def test_messages() -> None:
    parts = [
        {"type": "input_text", "text": "see "},
        {"type": "input_image", "image_url": "data:x"},
    ]
    assert items(
        {"type": "message", "role": "developer", "content": "d", "id": "msg_1", "phase": "x"},
        {"role": "system", "content": "s"},
        "plain",
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ) == (
        Message(Role.SYSTEM, "d"),
        Message(Role.SYSTEM, "s"),
        Message(Role.USER, "plain"),
        Message(Role.USER, "see " + IMAGE_OMITTED),
        Message(Role.ASSISTANT, "no"),
    )


def test_one_assistant_turn() -> None:
    turn = items(
        "hi",
        thought(),
        said("Looking."),
        call("c1", arguments='{"b": 1, "a": [2]}'),
        call("c2"),
        output("c1", "one"),
        output("c2", [{"type": "input_text", "text": "two"}, {"type": "input_image"}]),
        thought("next"),
        said("Done."),
        "more",
    )
    assert turn == (
        USER,
        Message(
            Role.ASSISTANT, "Looking.", "why",
            (ToolCall("c1", "ls", {"b": 1, "a": [2]}), ToolCall("c2", "ls", {})),
        ),
        Message(Role.TOOL, "one", call_id="c1"),
        Message(Role.TOOL, "two" + IMAGE_OMITTED, call_id="c2"),
        Message(Role.ASSISTANT, "Done.", "next"),
        Message(Role.USER, "more"),
    )  # fmt: skip
    assert list(turn[1].tool_calls[0].arguments) == ["b", "a"]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"summary": []}, None),
        ({"summary": [{"type": "summary_text", "text": ""}]}, None),
        ({"summary": [{"type": "summary_text", "text": "a"}]}, "a"),
        ({"summary": [], "content": [{"type": "reasoning_text", "text": "b"}]}, "b"),
        ({"summary": [{"text": "a"}], "content": [{"text": "b"}]}, "b"),
        ({"summary": [{"text": "a"}], "encrypted_content": seal("exact\n")}, "exact\n"),
        ({"summary": [{"text": "a"}], "encrypted_content": "b3BhcXVl"}, "a"),
        ({"summary": [{"text": "a"}], "encrypted_content": None, "content": None}, "a"),
        ({"summary": [{"text": "a"}, {"text": "b"}], "id": "rs_1"}, "a\n\nb"),
    ],
)
def test_reasoning(item: dict[str, Any], text: str | None) -> None:
    found = items("hi", {"type": "reasoning", **item}, said("t"))[1]
    assert found == Message(Role.ASSISTANT, "t", text)


def test_reasoning_alone_is_a_turn_only_with_text() -> None:
    assert items("hi", {"type": "reasoning", "summary": []}, "more") == (
        USER,
        Message(Role.USER, "more"),
    )
    assert items("hi", thought("a"), thought("b"), "more")[1].reasoning == "a\n\nb"


def test_texts_of_one_turn() -> None:
    assert items("hi", said("a"), said(""), said("b"))[1].text == "a\n\nb"
    assert items("hi", said("a"), call("c"), said("b"))[1].text == "ab"


def test_calls_of_other_kinds() -> None:
    found = items(
        "hi",
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** P\n"},
        {"type": "tool_search_call", "call_id": "c2", "execution": "client",
         "arguments": {"query": "q"}},
        {"type": "local_shell_call", "call_id": "c3", "action": {"command": ["ls"]}},
        output("c1", "ok", "custom_tool_call_output"),
        {"type": "tool_search_output", "call_id": "c2", "execution": "client", "tools": []},
        output("c3", "files", "local_shell_call_output"),
        tools=[PATCH, SEARCH],
    )  # fmt: skip
    assert found[1].tool_calls == (
        ToolCall("c1", "apply_patch", {"input": "*** P\n"}),
        ToolCall("c2", "tool_search", {"query": "q"}),
        ToolCall("c3", "local_shell", {"command": ["ls"]}),
    )
    assert [message.call_id for message in found[2:]] == ["c1", "c2", "c3"]
    assert found[3].text == "No tools found."


def test_broken_arguments_stay_usable() -> None:
    found = items("hi", call("a", arguments='{"cut'), call("b", arguments="[1]"),
                  call("c", arguments=" "), call("d", arguments=None))[1]  # fmt: skip
    assert [c.arguments for c in found.tool_calls] == [
        {"arguments": '{"cut'}, {"arguments": [1]}, {}, {},
    ]  # fmt: skip


def test_what_is_unknown_is_kept_as_text_or_dropped() -> None:
    request = parse(
        input=[
            "hi",
            {"type": "web_search_call", "id": "ws_1", "action": {"query": "q"}},
            {"type": "item_reference", "id": "x"},
            {"type": "compaction", "encrypted_content": "opaque"},
            {"type": "future_note", "text": "a note"},
            {"type": "future_words", "role": "assistant", "content": [{"text": "words"}]},
        ]
    )
    assert request.messages == (
        USER,
        Message(Role.SYSTEM, "[future_note]\na note"),
        Message(Role.ASSISTANT, "words"),
    )
    assert request.dropped == ("web_search_call", "item_reference", "compaction")


# ---------------------------------------------------------------- tools


def test_functions_in_the_form_of_the_templates() -> None:
    spec = parse(tools=[LS]).tools[0]
    assert spec.name == "ls"
    assert spec.definition == {
        "type": "function",
        "function": {"name": "ls", "description": "list", "parameters": LS["parameters"]},
    }
    assert spec.parameters == LS["parameters"]
    assert parse(tools=[{"type": "function", "name": "f"}]).tools[0].definition == {
        "type": "function",
        "function": {"name": "f"},
    }


def test_hosted_tools_are_not_offered() -> None:
    kinds = ["web_search", "file_search", "image_generation", "code_interpreter", "mcp",
             "computer", "tool_search", "something_new"]  # fmt: skip
    request = parse(tools=[*({"type": kind} for kind in kinds), LS], tool_choice="auto")
    assert [tool.name for tool in request.tools] == ["ls"]
    assert len(request.echo["tools"]) == len(kinds) + 1


def test_free_form_and_search_tools_are_functions() -> None:
    patch, search = parse(tools=[PATCH, SEARCH]).tools
    assert patch.name == "apply_patch"
    assert patch.parameters["required"] == ["input"]
    described = patch.parameters["properties"]["input"]
    assert described["type"] == "string"
    assert "start: /.+/s" in described["description"]
    assert search.name == "tool_search"
    assert search.parameters == SEARCH["parameters"]
    free = parse(tools=[{"type": "custom", "name": "f", "format": {"type": "text"}}]).tools[0]
    assert "grammar" not in json.dumps(free.definition)


def test_names_of_namespaces() -> None:
    other = {**AGENTS, "name": "other", "tools": [*AGENTS["tools"], {**PATCH, "name": "exec"}]}
    assert [tool.name for tool in parse(tools=[AGENTS]).tools] == ["spawn"]
    request = parse(tools=[LS, AGENTS, other, LS])
    assert [tool.name for tool in request.tools] == ["ls", "agents.spawn", "other.spawn", "exec"]
    assert request.tools[1].definition["function"]["name"] == "agents.spawn"
    with_plain = parse(tools=[AGENTS, {**LS, "name": "spawn"}])
    assert [tool.name for tool in with_plain.tools] == ["agents.spawn", "spawn"]
    history = items(
        "hi", call("a", "spawn", namespace="agents"), call("b", "spawn", namespace="gone"),
        tools=[AGENTS],
    )[1]  # fmt: skip
    assert [c.name for c in history.tool_calls] == ["spawn", "gone.spawn"]
    again = items("hi", call("a", "spawn", namespace="other"), tools=[AGENTS, other])[1]
    assert again.tool_calls[0].name == "other.spawn"
    without = items("hi", call("a", "spawn", namespace="agents"))[1]
    assert without.tool_calls[0].name == "spawn"


def test_tools_inside_the_input() -> None:
    request = parse(
        input=[{"type": "additional_tools", "role": "developer", "tools": [LS, AGENTS]}, "hi"]
    )
    assert [tool.name for tool in request.tools] == ["ls", "spawn"]
    assert request.messages == (USER,)


def test_found_tools_are_printed_where_they_were_found() -> None:
    found = {**LS, "name": "find"}
    clash = {**AGENTS, "name": "late"}
    request = parse(
        input=[
            "hi",
            {"type": "tool_search_call", "call_id": "c", "arguments": {}},
            {"type": "tool_search_output", "call_id": "c", "tools": [found, clash]},
        ],
        tools=[SEARCH, AGENTS, {**LS, "name": "lazy", "defer_loading": True}],
    )
    assert [(tool.name, tool.deferred) for tool in request.tools] == [
        ("tool_search", False), ("spawn", False), ("lazy", True), ("find", True),
        ("late.spawn", True),
    ]  # fmt: skip
    printed = [json.loads(line) for line in request.messages[-1].text.split("\n")]
    assert [entry["function"]["name"] for entry in printed] == ["find", "late.spawn"]
    assert printed[0] == request.tools[3].definition


def test_tool_choice() -> None:
    def choice(value: Any, **fields: Any) -> tuple[ToolChoice, str | None]:
        request = parse(tools=[LS, PATCH, SEARCH, AGENTS], tool_choice=value, **fields)
        return request.tool_choice, request.tool_name

    assert choice(None) == (ToolChoice.AUTO, None)
    assert choice("auto") == (ToolChoice.AUTO, None)
    assert choice("none") == (ToolChoice.NONE, None)
    assert choice("required") == (ToolChoice.REQUIRED, None)
    assert choice({"type": "function", "name": "ls"}) == (ToolChoice.NAMED, "ls")
    assert choice({"type": "custom", "name": "apply_patch"}) == (ToolChoice.NAMED, "apply_patch")
    assert choice({"type": "tool_search"}) == (ToolChoice.NAMED, "tool_search")
    member = {"type": "function", "name": "spawn", "namespace": "agents"}
    assert choice(member) == (ToolChoice.NAMED, "spawn")


def test_a_choice_of_hosted_tools_is_free() -> None:
    hosted = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]
    for choice in ("required", {"type": "web_search"}):
        assert parse(tools=hosted, tool_choice=choice).tool_choice is ToolChoice.AUTO
    with pytest.raises(UnsupportedParameter):
        parse(tools=hosted, tool_choice={"type": "file_search"})


def test_allowed_tools() -> None:
    def choice(*tools: Any, **fields: Any) -> tuple[ToolChoice, Any]:
        value = {"type": "allowed_tools", "tools": list(tools), **fields}
        request = parse(tools=[LS, PATCH, SEARCH, AGENTS], tool_choice=value)
        assert len(request.tools) > 3
        return request.tool_choice, request.allowed_tools

    ls = {"type": "function", "name": "ls"}
    member = {"type": "function", "name": "spawn", "namespace": "agents"}
    hosted = {"type": "web_search"}
    assert choice(ls, mode="auto") == (ToolChoice.AUTO, {"ls"})
    assert choice(ls, member, hosted) == (ToolChoice.AUTO, {"ls", "spawn"})
    both = choice({"type": "custom", "name": "apply_patch"}, {"type": "tool_search"})
    assert both == (ToolChoice.AUTO, {"apply_patch", "tool_search"})
    assert choice(ls, mode="required") == (ToolChoice.REQUIRED, {"ls"})
    assert choice(hosted) == (ToolChoice.NONE, None)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": {}}, "input"),
        ({"input": [3]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": 3}]}, "input[0].type"),
        ({"input": [{"role": "robot"}]}, "input[0].role"),
        ({"input": ["a", {"role": "user", "content": 3}]}, "input[1].content"),
        ({"input": [{"role": "user", "content": [{"text": 3}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": 3}]},
         "input[0].arguments"),
        ({"input": [{"type": "custom_tool_call", "name": "f", "input": 3}]}, "input[0].input"),
        ({"input": [{"type": "function_call_output", "output": 3}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "summary": {}}]}, "input[0].summary"),
        ({"input": [{"type": "reasoning", "encrypted_content": 3}]},
         "input[0].encrypted_content"),
        ({"input": [{"type": "additional_tools", "tools": [{}]}]}, "input[0].tools[0].type"),
        ({"instructions": 3}, "instructions"),
        ({"stream": "yes"}, "stream"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "x"}, "include"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a>b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]},
         "tools[0].tools[0].name"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "rm"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
            "tool_choice.tools",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "rm"}],
                }
            },
            "tool_choice.tools[0].name",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"text": []}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ],
)  # fmt: skip
def test_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt", "background"])
def test_state_that_is_not_kept(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse(**{name: True})
    assert caught.value.code == "unsupported_parameter"


KEYS = [
    "type", "role", "content", "text", "name", "tools", "summary", "output", "arguments", "call_id",
    "namespace", "encrypted_content", "input", "format", "action",
]  # fmt: skip
KINDS = [
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
    "tool_search_call", "tool_search_output", "additional_tools", "compaction", "namespace",
    "custom", "function", "user", "assistant",
]  # fmt: skip
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5) | st.sampled_from(KINDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=10,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        ["input", "tools", "tool_choice", "text", "reasoning", "include", "instructions"]
    ),
    JSON_VALUES,
    max_size=4,
)


@given(FIELDS)
def test_any_body_parses_or_is_a_400(fields: dict[str, Any]) -> None:
    refusal = None
    try:
        body = orjson.dumps({"model": "m", "input": "hi", **fields})
        request = responses.parse(body, DEFAULTS)
        orjson.dumps(request.echo)
    except InvalidRequest as error:
        refusal = error
    assert refusal is None or (refusal.status == 400 and str(refusal).endswith("."))
