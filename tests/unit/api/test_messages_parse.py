"""Bodies of the Messages dialect -> core.Request."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.api.chat_messages import CONTENT_OMITTED, IMAGE_OMITTED
from kslserve.api.messages_parse import DefaultThinking, MessagesRequest, parse
from kslserve.core.request import Message, ResponseFormat, Role, ToolCall, ToolChoice
from kslserve.core.sampling import SamplingParams
from kslserve.errors import InvalidRequest

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, presence_penalty=1.5)
HI: list[Any] = [{"role": "user", "content": "hi"}]
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.76d; a=b"}
READ = {
    "name": "read_file",
    "description": "Read a file",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}


class Read:
    """What a body gives, and how many blocks were dropped."""

    def __init__(
        self, default: DefaultThinking = DefaultThinking.HIDDEN, *, count: bool = False, **body: Any
    ) -> None:
        self.dropped = 0
        body = {"model": "m", "max_tokens": 9, "messages": HI, **body}
        self.parsed: MessagesRequest = parse(
            json.dumps(body).encode(), DEFAULTS, default, self._drop, count_only=count
        )
        self.request = self.parsed.request
        self.messages = self.request.messages

    def _drop(self) -> None:
        self.dropped += 1


def refused(**body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        Read(**body)
    return caught.value


def content_of(*blocks: Any, role: str = "user") -> tuple[Message, ...]:
    return Read(messages=[{"role": role, "content": list(blocks)}]).messages


# ---------------------------------------------------------------- fields


def test_defaults() -> None:
    request = Read().request
    assert request.model == "m"
    assert request.messages == (Message(Role.USER, "hi"),)
    assert request.sampling == DEFAULTS
    assert request.max_tokens == 9
    assert not request.stream
    assert request.stop == ()
    assert request.tool_choice is ToolChoice.AUTO
    assert request.parallel_tool_calls
    assert (request.effort, request.preserve_thinking, request.priority) == (None, None, 0)


def test_fields_are_honoured() -> None:
    request = Read(
        stream=True, temperature=0, top_p=0.5, top_k=7, seed=3, priority=-2,
        preserve_thinking=False, stop_sequences=["a", "", "a", "b"], max_tokens=128000,
    ).request  # fmt: skip
    assert request.stream
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert sampling.presence_penalty == DEFAULTS.presence_penalty
    assert sampling.seed == 3
    assert request.priority == -2
    assert request.preserve_thinking is False
    assert request.stop == ("a", "b")
    assert request.max_tokens == 128000


def test_a_missing_limit_is_none() -> None:
    assert Read(max_tokens=None).request.max_tokens is None


def test_what_can_be_ignored_is() -> None:
    plain = Read().request
    full = Read(
        metadata={"user_id": 3}, context_management={"edits": [{"type": "clear_thinking"}]},
        container="c", service_tier="auto", speed="fast", inference_geo="eu", diagnostics={},
        fallbacks=[1], mcp_servers=[{}], thread="t", compaction={}, safeguards=[{}],
        cache_control={"type": "ephemeral"}, from_next_year=[None],
    ).request  # fmt: skip
    assert full == plain


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
         "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 1}]}]},
         "messages[0].content[0].content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 1}]}]},
         "messages[0].content[0].name"),
        ({"messages": [{"role": "assistant",
                        "content": [{"type": "tool_use", "name": "a", "input": "x"}]}]},
         "messages[0].content[0].input"),
        ({"system": 3}, "system"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": "warm"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["a", 3]}, "stop_sequences[1]"),
        ({"stop_sequences": ["a" * 1025]}, "stop_sequences"),
        ({"tools": [{"description": "x"}]}, "tools[0].name"),
        ({"tools": [{"name": "a>b"}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}, "tools": [READ]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [READ]}, "tool_choice.name"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)  # fmt: skip
def test_errors_name_the_field(body: dict[str, Any], param: str) -> None:
    error = refused(**body)
    assert error.param == param
    assert str(error).startswith(param)


def test_strict_tools() -> None:
    tools = [{"name": "a", "strict": True}, {"name": "b", "strict": False}, {"name": "c"}]
    assert [tool.strict for tool in Read(tools=tools).request.tools] == [True, False, False]


def test_counting_looks_at_the_prompt_only() -> None:
    answer: dict[str, Any] = {"max_tokens": "9", "stop_sequences": 3, "stream": 1}
    form: dict[str, Any] = {"output_config": {"effort": "low", "format": {"type": "json_schema"}}}
    counted = Read(count=True, **answer, **form).request
    assert counted.messages == Read().messages
    assert counted.effort == "low"
    assert refused(**form).param == "output_config.format.schema"
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    found = Read(output_config={"format": {"type": "json_schema", "schema": schema}}).request
    assert found.response_format == ResponseFormat(schema, False, "output_config.format.schema")


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("default", "body", "thinking", "shown"),
    [
        (DefaultThinking.HIDDEN, {}, True, False),
        (DefaultThinking.ON, {}, True, True),
        (DefaultThinking.OFF, {}, False, False),
        (DefaultThinking.HIDDEN, {"output_config": {"effort": "None"}}, False, False),
        (DefaultThinking.OFF, {"thinking": {"type": "adaptive", "display": "omitted"}}, True, True),
        (DefaultThinking.OFF, {"thinking": {"type": "enabled"}}, True, True),
        (DefaultThinking.ON, {"thinking": {"type": "disabled"}}, False, True),
        (DefaultThinking.ON,
         {"thinking": {"type": "adaptive"}, "output_config": {"effort": "none"}}, True, True),
    ],
)  # fmt: skip
def test_thinking(
    default: DefaultThinking, body: dict[str, Any], thinking: bool, shown: bool
) -> None:
    read = Read(default, **body)
    assert read.request.thinking is thinking
    assert read.parsed.show_thinking is shown


def test_a_budget_is_no_effort() -> None:
    request = Read(thinking={"type": "enabled", "budget_tokens": 31999}).request
    assert (request.reasoning_budget, request.effort, request.thinking) == (31999, None, True)
    assert Read(output_config={"effort": "max"}).request.effort == "max"
    assert Read(thinking={"type": "disabled", "budget_tokens": 5}).request.reasoning_budget is None


# ---------------------------------------------------------------- messages


def test_marks_and_lists_mean_nothing() -> None:
    block = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": []}
    assert content_of(block) == content_of("hi") == Read().messages
    result = {"type": "tool_result", "tool_use_id": "t", "content": "out", "is_error": False}
    listed = {"cache_control": {}, "content": [{"type": "text", "text": "out"}], "is_error": True}
    assert content_of(result) == content_of({**result, **listed})


def test_system_blocks() -> None:
    rules = {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}}
    more = {"type": "text", "text": "More."}
    wanted = (Message(Role.SYSTEM, "Rules."), Message(Role.SYSTEM, "More."), *Read().messages)
    assert Read(system=[BILLING, rules, more]).messages == wanted
    assert Read(system="Rules.").messages == (wanted[0], wanted[2])
    assert Read(system=BILLING["text"] + "\nRules.").messages == (wanted[0], wanted[2])
    for empty in ("", " \n", [], [BILLING], BILLING["text"]):
        assert Read(system=empty).messages == Read().messages


def test_results_come_first_and_in_their_order() -> None:
    messages = content_of(
        {"type": "text", "text": "and now?"},
        {"type": "tool_result", "tool_use_id": "b", "content": "B"},
        {
            "type": "tool_result",
            "tool_use_id": "a",
            "content": [PNG, {"type": "text", "text": "A"}],
        },
        PNG,
    )
    assert messages == (
        Message(Role.TOOL, "B", call_id="b"),
        Message(Role.TOOL, IMAGE_OMITTED + "A", call_id="a"),
        Message(Role.USER, "and now?" + IMAGE_OMITTED),
    )


def test_a_result_without_content() -> None:
    block = {"type": "tool_result", "tool_use_id": "a"}
    assert content_of(block) == (Message(Role.TOOL, "", call_id="a"),)
    assert content_of() == (Message(Role.USER, ""),)


def test_assistant_turns() -> None:
    (message,) = content_of(
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "zz"},
        {"type": "text", "text": "Reading."},
        {"type": "tool_use", "id": "toolu_1", "name": "read_file", "input": {"b": 1, "a": [None]}},
        {"type": "text", "text": " Wait."},
        {"type": "tool_use", "id": "toolu_2", "name": "stop"},
        role="assistant",
    )
    assert message == Message(
        Role.ASSISTANT,
        "Reading. Wait.",
        "hm",
        (ToolCall("toolu_1", "read_file", {"b": 1, "a": [None]}), ToolCall("toolu_2", "stop", {})),
    )
    assert list(message.tool_calls[0].arguments) == ["b", "a"]
    assert content_of({"type": "text", "text": "x"}, role="assistant")[0].reasoning is None


def test_system_in_the_middle() -> None:
    messages = Read(
        messages=[
            *HI,
            {"role": "system", "content": "One.", "clear_at": "never", "output_config": {}},
            {"role": "system", "content": [{"type": "text", "text": "Two."}]},
            {"role": "developer", "content": [BILLING, {"type": "text", "text": "Three."}]},
            {"role": "system", "content": []},
        ]
    ).messages
    assert messages[1:] == tuple(Message(Role.SYSTEM, text) for text in ("One.", "Two.", "Three."))


def test_documents() -> None:
    def document(source: Any) -> str:
        return content_of({"type": "document", "title": "t", "source": source})[0].text

    assert document({"type": "text", "media_type": "text/plain", "data": "body"}) == "body"
    assert document({"type": "content", "content": [{"type": "text", "text": "b"}]}) == "b"
    assert document({"type": "content", "content": "c"}) == "c"
    assert document({"type": "base64", "data": "AA=="}) == CONTENT_OMITTED
    assert document({"type": "url", "url": "http://x"}) == CONTENT_OMITTED
    assert document(None) == CONTENT_OMITTED
    found = {"type": "search_result", "source": "s", "content": [{"type": "text", "text": "f"}]}
    assert content_of(found)[0].text == "f"


def test_redacted_reasoning_is_nothing_unknown() -> None:
    block = {"type": "redacted_thinking", "data": "zz"}
    read = Read(messages=[*HI, {"role": "assistant", "content": [block]}])
    assert read.messages[1] == Message(Role.ASSISTANT)
    assert read.dropped == 0


def test_unknown_blocks_are_dropped_and_counted() -> None:
    strange = {"type": "hologram", "text": "no"}
    read = Read(
        system=[strange],
        messages=[
            {"role": "user", "content": [strange, {"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s", "name": "w"}]},
            {"role": "user", "content": [{"type": "tool_result", "content": [strange]}]},
        ],
    )
    assert read.dropped == 4
    assert read.messages == (
        Message(Role.USER, "hi"), Message(Role.ASSISTANT), Message(Role.TOOL),
    )  # fmt: skip


# ---------------------------------------------------------------- tools


def test_tools() -> None:
    extras = {
        "cache_control": {},
        "eager_input_streaming": True,
        "input_examples": [1],
        "strict": True,
    }
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    tools = Read(
        tools=[{**READ, **extras, "type": "custom"}, hosted, {"name": "bare"}]
    ).request.tools
    assert [tool.name for tool in tools] == ["read_file", "bare"]
    function = {
        "name": "read_file", "description": "Read a file", "parameters": READ["input_schema"],
    }  # fmt: skip
    assert tools[0].definition == {"type": "function", "function": function}
    assert list(tools[0].definition["function"]) == ["name", "description", "parameters"]
    assert tools[0].parameters == READ["input_schema"]
    assert not tools[0].deferred
    assert (tools[0].strict, tools[1].strict) == (True, False)
    assert tools[1].definition == {"type": "function", "function": {"name": "bare"}}
    assert Read(tools=[]).request.tools == ()


@pytest.mark.parametrize(
    ("given", "choice", "name", "parallel"),
    [
        ({"type": "auto"}, ToolChoice.AUTO, None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice.AUTO, None, False),
        ({"type": "any", "disable_parallel_tool_use": False}, ToolChoice.REQUIRED, None, True),
        ({"type": "tool", "name": "read_file"}, ToolChoice.NAMED, "read_file", True),
        ({"type": "none"}, ToolChoice.NONE, None, True),
        ({"type": "tool", "name": "web_search"}, ToolChoice.AUTO, None, True),
    ],
)
def test_tool_choice(
    given: dict[str, Any], choice: ToolChoice, name: str | None, parallel: bool
) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    request = Read(tools=[READ, hosted], tool_choice=given).request
    assert (request.tool_choice, request.tool_name) == (choice, name)
    assert request.parallel_tool_calls is parallel
    assert [tool.name for tool in request.tools] == ["read_file"]


def test_any_of_hosted_tools_only_is_free() -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    assert Read(tools=[hosted], tool_choice={"type": "any"}).request.tool_choice is ToolChoice.AUTO


def test_deferred_tools_appear_at_their_reference() -> None:
    deferred = {"name": "Zoom", "description": "nah é", "defer_loading": True}
    other = {**deferred, "name": "Other"}
    read = Read(
        tools=[READ, deferred, other],
        messages=[
            *HI,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Search"}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
                {"type": "text", "text": "Found:"},
                {"type": "tool_reference", "tool_name": "Zoom"},
                {"type": "tool_reference", "tool_name": "Other"},
                {"type": "tool_reference", "tool_name": "Gone"},
                {"type": "text", "text": "end"},
            ]}]},
        ],
    )  # fmt: skip
    assert [tool.deferred for tool in read.request.tools] == [False, True, True]
    lines = read.messages[2].text.split("\n")
    assert lines[0] == "Found:"
    assert lines[1] == (
        '{"type": "function", "function": {"name": "Zoom", "description": "nah é"}}'
    )
    assert json.loads(lines[2])["function"]["name"] == "Other"
    assert lines[3:] == ["Gone", "end"]


def test_tools_that_come_in_system_messages() -> None:
    inline = {"name": "Late", "input_schema": {"type": "object"}}
    defined = {"type": "tool_definition", "definition": inline}
    read = Read(
        tools=[{**READ, "defer_loading": True}],
        messages=[
            *HI,
            {"role": "system", "content": [
                {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "read_file"}},
                {"type": "tool_addition", "tool": defined},
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "old"}},
                {"type": "tool_addition"},
                {"type": "tool_removal", "tool": {"type": "mcp_toolset_reference"}},
            ]},
        ],
    )  # fmt: skip
    first, second, third = read.messages[1].text.split("\n")
    assert json.loads(first)["function"]["name"] == "read_file"
    assert json.loads(second)["function"] == {"name": "Late", "parameters": {"type": "object"}}
    assert third == "The tool old is no longer available."
    assert [(tool.name, tool.deferred) for tool in read.request.tools] == [
        ("read_file", True), ("Late", True),
    ]  # fmt: skip
    assert read.dropped == 0


# ---------------------------------------------------------------- anything at all

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
_KINDS = (
    "text image document tool_use tool_result thinking redacted_thinking tool_reference "
    "tool_addition tool_removal search_result new"
)
_FIELDS = "text content id name input tool_use_id source tool thinking tool_name signature is_error"
_BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(_KINDS.split())}, optional=dict.fromkeys(_FIELDS.split(), _JSON)
)
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"])},
    optional={"content": st.text() | st.lists(_BLOCK, max_size=4) | _JSON},
)
_OTHERS = (
    "system tools tool_choice thinking output_config stop_sequences max_tokens temperature top_k "
    "stream seed priority"
)
_BODY = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": st.lists(_MESSAGE, max_size=4) | _JSON},
    optional=dict.fromkeys(_OTHERS.split(), _JSON),
)


@given(_BODY)
def test_any_body_parses_or_names_its_fault(body: dict[str, Any]) -> None:
    try:
        data = json.dumps(body, allow_nan=False).encode()
    except (ValueError, UnicodeEncodeError):
        return
    with contextlib.suppress(InvalidRequest):
        parsed = parse(data, DEFAULTS, DefaultThinking.HIDDEN, lambda: None)
        assert all(isinstance(message.text, str) for message in parsed.request.messages)
