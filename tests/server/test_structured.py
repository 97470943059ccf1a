"""Structured output of the bundled model through the official libraries: whatever it is asked, its
answer fits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from kslserve.config import Settings
from tests.server.serving import Server, serving

QUIET = {"enable_thinking": False}
PROMPTS = ("What is 2+2?", "Describe the weather as JSON.", "Read the file src/main.py")


def fields(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


WEATHER = fields(
    {
        "city": {"type": "string", "maxLength": 20},
        "degrees": {"type": "integer", "minimum": -90, "maximum": 60},
        "sky": {"enum": ["clear", "cloudy", "rain"]},
        "hours": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "wind": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/wind"}]},
    },
    **{"$defs": {"wind": fields({"from": {"type": "string", "pattern": "^[NSEW]{1,2}$"}})}},
)
SCHEMAS: list[tuple[Any, Callable[[Any], bool]]] = [
    (
        WEATHER,
        lambda v: (
            list(v) == ["city", "degrees", "sky", "hours", "wind"]
            and len(v["city"]) <= 20
            and -90 <= v["degrees"] <= 60
            and v["sky"] in ("clear", "cloudy", "rain")
            and 1 <= len(v["hours"]) <= 3
            and (v["wind"] is None or re.fullmatch("[NSEW]{1,2}", v["wind"]["from"]) is not None)
        ),
    ),
    (fields({"answer": {"type": "number"}}), lambda v: isinstance(v["answer"], int | float)),
    (fields({"ok": {"const": True}}), lambda v: v == {"ok": True}),
]
EDIT: Any = {
    "type": "function",
    "function": {
        "name": "edit_file",
        "description": "Edit a file",
        "strict": True,
        "parameters": fields(
            {
                "path": {"type": "string"},
                "mode": {"enum": ["replace", "append"]},
                "line": {"type": "integer", "minimum": 1, "maximum": 500},
            }
        ),
    },
}
READ: Any = {
    "type": "function",
    "function": {"name": "read_file", "parameters": {"properties": {"path": {"type": "string"}}}},
}


def fits_edit(arguments: dict[str, Any]) -> bool:
    return (
        set(arguments) == {"path", "mode", "line"}
        and isinstance(arguments["path"], str)
        and arguments["mode"] in ("replace", "append")
        and type(arguments["line"]) is int
        and 1 <= arguments["line"] <= 500
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(Settings(context=4096, max_seqs=8)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def messages_client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=server.root, api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


def form(schema: Any) -> Any:
    inner = {"name": "out", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": inner}


def ask(client: openai.OpenAI, text: str, *, stream: bool = False, **options: Any) -> Any:
    """(content, reasoning, finish reason) of a turn."""
    options.setdefault("max_tokens", 1500)
    options.setdefault("extra_body", QUIET)
    messages: Any = [{"role": "user", "content": text}]
    if not stream:
        answer = client.chat.completions.create(model="m", messages=messages, **options)
        choice = answer.choices[0]
        reasoning = getattr(choice.message, "reasoning_content", None) or ""
        return choice.message.content, reasoning, choice.finish_reason
    content = reasoning = ""
    finish = None
    with client.chat.completions.create(
        model="m", messages=messages, stream=True, **options
    ) as chunks:
        for chunk in chunks:
            for choice in chunk.choices:
                content += choice.delta.content or ""
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                finish = choice.finish_reason or finish
    return content, reasoning, finish


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("place", range(len(SCHEMAS)))
def test_a_schema_is_kept(
    client: openai.OpenAI, place: int, temperature: float, stream: bool
) -> None:
    schema, fits = SCHEMAS[place]
    for seed, prompt in enumerate(PROMPTS):
        content, _, finish = ask(
            client, prompt, stream=stream, temperature=temperature, seed=seed,
            response_format=form(schema),
        )  # fmt: skip
        assert finish == "stop"
        assert fits(json.loads(content)), content


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_free_and_the_answer_is_not(client: openai.OpenAI, stream: bool) -> None:
    schema, fits = SCHEMAS[0]
    body = {"thinking": {"type": "enabled", "budget_tokens": 40}}
    for seed, prompt in enumerate(PROMPTS):
        content, reasoning, finish = ask(
            client, prompt, stream=stream, temperature=1.0, seed=seed,
            response_format=form(schema), extra_body=body,
        )  # fmt: skip
        assert finish == "stop"
        assert reasoning.strip()
        assert fits(json.loads(content)), content


def test_any_object(client: openai.OpenAI) -> None:
    """A small model need not come to an end, but where it does it wrote an object."""
    ended = 0
    for seed in range(4):
        content, _, finish = ask(
            client, PROMPTS[1], seed=seed, temperature=0.7, max_tokens=600,
            response_format={"type": "json_object"},
        )  # fmt: skip
        assert content.lstrip().startswith("{")
        if finish == "stop":
            assert isinstance(json.loads(content), dict)
            ended += 1
    assert ended


def test_masked_and_free_rows_side_by_side(client: openai.OpenAI) -> None:
    schema, fits = SCHEMAS[0]

    def free(seed: int) -> str:
        content: str = ask(client, "Tell me of it.", temperature=1.0, seed=seed, max_tokens=80)[0]
        return content

    def held(seed: int) -> bool:
        content = ask(client, "Go.", temperature=1.0, seed=seed, response_format=form(schema))[0]
        return fits(json.loads(content))

    alone = [free(seed) for seed in range(3)]
    with ThreadPoolExecutor(8) as pool:
        masked = [pool.submit(held, seed) for seed in range(5)]
        together = [pool.submit(free, seed) for seed in range(3)]
        assert all(each.result() for each in masked)
        assert [each.result() for each in together] == alone


def test_parse_of_the_official_library(client: openai.OpenAI) -> None:
    import pydantic

    class Out(pydantic.BaseModel):
        answer: int
        unit: str = pydantic.Field(max_length=8)

    answer = client.chat.completions.parse(
        model="m", messages=[{"role": "user", "content": PROMPTS[0]}], response_format=Out,
        max_tokens=400, extra_body=QUIET,
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Out)


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_arguments_of_a_strict_tool(client: openai.OpenAI, temperature: float) -> None:
    ended = 0
    for seed in range(4):
        answer = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Edit src/main.py"}], tools=[EDIT],
            tool_choice={"type": "function", "function": {"name": "edit_file"}},
            temperature=temperature, seed=seed, max_tokens=800,
        )  # fmt: skip
        (call,) = answer.choices[0].message.tool_calls or ()
        if answer.choices[0].finish_reason == "tool_calls":
            assert call.function.name == "edit_file"  # type: ignore[union-attr]
            assert fits_edit(json.loads(call.function.arguments))  # type: ignore[union-attr]
            ended += 1
    assert ended


@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_that_the_model_makes_by_itself(client: openai.OpenAI, thinking: bool) -> None:
    """It knows of a path; the other parameter is new to it."""
    modes = ("utf-8", "bytes")
    read = json.loads(json.dumps(READ))
    read["function"] |= {
        "strict": True,
        "parameters": fields({"path": {"type": "string"}, "encoding": {"enum": modes}}),
    }
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": PROMPTS[2]}], tools=[read],
        temperature=0.0, max_tokens=800, extra_body={"enable_thinking": thinking},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in answer.choices[0].message.tool_calls or ():
        arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
        assert set(arguments) == {"path", "encoding"}
        assert arguments["encoding"] in modes


def test_a_required_call_names_a_declared_tool(client: openai.OpenAI) -> None:
    names = set()
    for seed in range(6):
        answer = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], tools=[EDIT, READ],
            tool_choice="required", temperature=1.5, seed=seed, max_tokens=300,
        )  # fmt: skip
        for call in answer.choices[0].message.tool_calls or ():
            names.add(call.function.name)  # type: ignore[union-attr]
    assert names
    assert names <= {"edit_file", "read_file"}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_call_of_an_allowed_tool_only(client: openai.OpenAI, mode: str) -> None:
    """It would read a file; only the other tool may be called."""
    allowed: Any = {"mode": mode, "tools": [{"type": "function", "function": {"name": "list"}}]}
    other: Any = json.loads(json.dumps(READ))
    other["function"]["name"] = "list"
    names = []
    for seed in range(3):
        answer = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": PROMPTS[2]}], tools=[READ, other],
            tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
            temperature=0.7, seed=seed, max_tokens=400, extra_body=QUIET,
        )  # fmt: skip
        names += [c.function.name for c in answer.choices[0].message.tool_calls or ()]  # type: ignore[union-attr]
    assert set(names) == {"list"}


# ---------------------------------------------------------------- the other dialects


def test_messages(messages_client: anthropic.Anthropic) -> None:
    schema, fits = SCHEMAS[0]
    answer = messages_client.messages.create(
        model="m", max_tokens=1500, messages=[{"role": "user", "content": PROMPTS[0]}],
        thinking={"type": "enabled", "budget_tokens": 30},
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )  # fmt: skip
    text = "".join(block.text for block in answer.content if block.type == "text")
    assert answer.stop_reason == "end_turn"
    assert fits(json.loads(text)), text


def test_a_budget_ends_the_thinking(messages_client: anthropic.Anthropic) -> None:
    for budget in (5, 20):
        answer = messages_client.messages.create(
            model="m", max_tokens=400, messages=[{"role": "user", "content": PROMPTS[2]}],
            thinking={"type": "enabled", "budget_tokens": budget},
            extra_body={"temperature": 1.0, "seed": 5},
        )  # fmt: skip
        kinds = [block.type for block in answer.content]
        assert kinds[0] == "thinking"
        assert {"text", "tool_use"} & set(kinds)


def test_responses(client: openai.OpenAI) -> None:
    schema, fits = SCHEMAS[0]
    answer = client.responses.create(
        model="m", input=PROMPTS[0], max_output_tokens=1500, extra_body=QUIET,
        text={"format": {"type": "json_schema", "name": "out", "schema": schema, "strict": True}},
    )  # fmt: skip
    assert answer.status == "completed"
    assert fits(json.loads(answer.output_text)), answer.output_text


# ---------------------------------------------------------------- errors


def test_a_schema_that_cannot_be_compiled(
    server: Server, client: openai.OpenAI, messages_client: anthropic.Anthropic
) -> None:
    before = server.metric("generations_started_total")
    bad = fields({"x": {"type": "string", "pattern": "(?=a)"}})
    with pytest.raises(openai.BadRequestError, match=r"schema cannot be .*properties\.x") as caught:
        ask(client, "x", response_format=form(bad))
    assert caught.value.param == "response_format.json_schema.schema"
    with pytest.raises(openai.BadRequestError, match=r"properties\.x"):
        client.responses.create(
            model="m", input="x",
            text={"format": {"type": "json_schema", "name": "o", "schema": bad, "strict": True}},
        )  # fmt: skip
    with pytest.raises(anthropic.BadRequestError, match=r"properties\.x"):
        messages_client.messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}],
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": bad}}},
        )  # fmt: skip
    strict = json.loads(json.dumps(EDIT))
    strict["function"]["parameters"]["properties"]["line"]["not"] = {"const": 4}
    with pytest.raises(openai.BadRequestError, match=r"edit_file .*parameter line") as caught:
        ask(client, "x", tools=[READ, strict])
    assert caught.value.param == "tools[1]"
    assert server.metric("generations_started_total") == before


def test_a_grammar_that_grows_too_large(server: Server, client: openai.OpenAI) -> None:
    many = {f"p{i}": {"type": "integer"} for i in range(700)}
    schema = {"type": "object", "properties": many}
    with pytest.raises(openai.InternalServerError, match="could not be held to its grammar"):
        ask(client, "x", response_format=form(schema))
    content, _, _ = ask(client, "x", response_format=form(SCHEMAS[2][0]))
    assert json.loads(content) == {"ok": True}


def test_a_client_that_leaves_early(server: Server, client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": PROMPTS[1]}], stream=True,
        response_format=form({"type": "array", "minItems": 400, "items": {"type": "integer"}}),
        extra_body=QUIET,
    ) as chunks:  # fmt: skip
        for _, _chunk in zip(range(5), chunks, strict=False):
            pass
    assert ask(client, PROMPTS[0], response_format=form(SCHEMAS[2][0]))[0].replace(" ", "")
