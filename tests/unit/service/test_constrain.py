"""What a constraint lets a generation say, for any model: ids are drawn at random."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable
from typing import Any, cast

import pytest

from kslserve.errors import InvalidRequest, KslError
from kslserve.service.constrain import Constraint
from kslserve.service.grammar import GrammarError, Grammars
from tests.unit.service.guiding import (
    Guides,
    ResponseFormat,
    Run,
    ToolChoice,
    allowed,
    allows,
    guides,
    id_of,
    ids_of,
    nano,
    request,
    tool,
)

THINK_CLOSE, CALL_OPEN = "</think>", "<tool_call>"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b c"]}, "maxItems": 3},
        "home": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[tuple[Any, Callable[[Any], bool]]] = [
    (
        PERSON,
        lambda v: (
            list(v) == ["name", "age", "tags", "home"]
            and isinstance(v["name"], str)
            and len(v["name"]) <= 12
            and 0 <= v["age"] <= 150
            and set(v["tags"]) <= {"a", "b c"}
            and (v["home"] is None or re.fullmatch("[0-9]{5}", v["home"]["zip"]) is not None)
        ),
    ),
    ({"enum": ["yes", "no"]}, lambda v: v in ("yes", "no")),
    ({"type": "integer", "minimum": 3, "maximum": 12}, lambda v: 3 <= v <= 12),
    ({"type": "boolean"}, lambda v: isinstance(v, bool)),
    (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
        lambda v: 1 <= len(v) <= 4 and all(isinstance(x, bool) for x in v),
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"const": 7}},
            "required": ["a"],
            "maxProperties": 1,
        },
        lambda v: v["a"] == 7,
    ),
]


@pytest.mark.parametrize("place", range(len(SCHEMAS)))
def test_any_output_fits_the_schema(place: int) -> None:
    schema, fits = SCHEMAS[place]
    wanted = request(response_format=ResponseFormat(schema, strict=True))
    for seed in range(6):
        run = Run(wanted, seed=seed)
        value = json.loads(run.finish(1500))
        assert fits(value), value
        assert run.masked > 0


def test_any_object_is_an_object() -> None:
    wanted = request(response_format=ResponseFormat())
    run = Run(wanted)
    run.say('{"a": [1, {"b": "\\u00e9 \\"x\\""}], "c": null}')
    assert allowed(run.guide.mask) == sorted(nano().end_of_turn_ids)
    for text in ("[1]", "x", '"a"', "\n"):
        assert not allows(Run(wanted).guide.mask, ids_of(text)[0])


def test_reasoning_is_free_but_cannot_end_the_turn() -> None:
    run = Run(request(response_format=ResponseFormat(SCHEMAS[1][0])), thinking=True)
    run.say("Some <b>thought</b>, {]\n")
    assert not any(allows(run.guide.mask, end) for end in nano().end_of_turn_ids)
    before = run.guide.version
    run.say("and more")
    assert run.guide.version == before, "the same mask stays"
    run.say(THINK_CLOSE)
    # The blank line is the format's own, and may be one id or two.
    assert all(allows(run.guide.mask, ids_of(text)[0]) for text in ("\n\n", "\n", '"yes"'))
    run.give(ids_of("\n")[0])
    assert not allows(run.guide.mask, ids_of("\n\n")[0])
    run.give(ids_of("\n")[0])
    assert not allows(run.guide.mask, ids_of("\n")[0])
    run.finish()
    assert run.answer() in ('"yes"', '"no"')


@pytest.mark.parametrize("indent", [None, 2, 4, "\t"])
def test_json_may_be_written_in_any_common_way(indent: int | str | None) -> None:
    value = {"name": "x", "age": 3, "tags": ["a", "b c"], "home": {"zip": "12345"}}
    run = Run(request(response_format=ResponseFormat(PERSON)))
    run.say(json.dumps(value, indent=indent))
    assert allowed(run.guide.mask) == sorted(nano().end_of_turn_ids)
    Run(request(response_format=ResponseFormat(PERSON))).say(
        json.dumps(value, separators=(",", ":"))
    )


@pytest.mark.parametrize("space", ["\n", " ", "\t"])
def test_white_space_is_bounded(space: str) -> None:
    run = Run(request(response_format=ResponseFormat(PERSON)))
    run.say("{\n")
    for _ in range(30):
        if not allows(run.guide.mask, ids_of(space)[0]):
            break
        run.give(ids_of(space)[0])
    else:
        pytest.fail("no bound")
    json.loads(run.finish(1500))


def test_a_control_token_is_no_text_of_a_json_string() -> None:
    run = Run(request(response_format=ResponseFormat()))
    run.say('{"a": "')
    assert not allows(run.guide.mask, id_of(CALL_OPEN))
    assert not allows(run.guide.mask, nano().end_of_turn_ids[0])


@pytest.mark.parametrize(
    ("schema", "part"),
    [
        ({"type": "object", "properties": {"x": {"type": "frob"}}}, "properties.x: .*frob"),
        ({"type": "array", "items": {"not": {}}}, "items: .*not"),
        ({"$defs": {"y": {"pattern": "(?=a)", "type": "string"}}, "$ref": "#/$defs/y"}, "y: .*oo"),
        ({"type": "object", "properties": {"e": {"enum": []}}, "required": ["e"]}, "s.e: .*empty"),
        ({"$ref": "http://elsewhere/x"}, "elsewhere"),
        ({"$ref": "#"}, "allows nothing"),
        (functools.reduce(lambda inner, _: {"items": inner}, range(900), {}), "recursion|nested"),
        ({"type": "integer", "minimum": 10**400}, "range"),
        (3, "cannot be enforced"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_compiled_is_named(schema: Any, part: str) -> None:
    wanted = request(response_format=ResponseFormat(schema, strict=True, path="body.schema"))
    with pytest.raises(InvalidRequest, match=part) as caught:
        guides().make_now(wanted, False)
    assert caught.value.param == "body.schema"
    assert caught.value.message.startswith("body.schema cannot be enforced: ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 600


def test_keywords_that_cannot_be_enforced_are_left_out_unless_strict() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 2}
    run = Run(request(response_format=ResponseFormat(schema)))
    assert len(json.loads(run.finish())) <= 2
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        Run(request(response_format=ResponseFormat(schema, strict=True)))


# ---------------------------------------------------------------- calls

MODE = {"enum": ["read", "write"]}
EDIT = tool(
    "edit",
    {
        "text": {"type": "string"},
        "mode": MODE,
        "line": {"type": "integer", "minimum": 1, "maximum": 99},
        "code": {"type": "string", "pattern": "^[a-c]{2}$"},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "where": {"anyOf": [{"enum": ["top", "end"]}, {"type": "integer"}, {"type": "null"}]},
        "note": {"type": ["string", "null"]},
    },
    required=["text", "mode", "line", "code", "flags"],
)
LOOSE = tool("loose", {"x": {"type": "string"}}, strict=False)
HEAD = "<tool_call>\n<function=edit>\n"


def fits_edit(arguments: dict[str, Any]) -> bool:
    required = {"text", "mode", "line", "code", "flags"}
    where = arguments.get("where")
    return (
        required <= set(arguments) <= required | {"where", "note"}
        and arguments["mode"] in ("read", "write")
        and 1 <= arguments["line"] <= 99
        and re.fullmatch("[a-c]{2}", arguments["code"]) is not None
        and len(arguments["flags"]) <= 2
        and (where is None or type(where) is int or where in ("top", "end"))
    )


def free_text(text: str) -> str:
    """Some prose, then a call; inside of it values that quote markup."""
    if "<tool_call>" not in text:
        return "I will.\n\n<tool_call>"
    if text.endswith("</tool_call>"):
        return ""
    if text.endswith("=loose>\n"):
        return "<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    return 'a <b> </parameter> "c"\nd\n</parameter>'


@pytest.mark.parametrize("seed", range(8))
def test_any_call_of_a_strict_tool_has_exact_arguments(seed: int) -> None:
    run = Run(request(tools=(EDIT, LOOSE)), seed=seed, free=free_text)
    run.finish(3000)
    (call,) = run.calls()
    assert call[0] in ("edit", "loose")
    if call[0] == "edit":
        assert fits_edit(call[1]), call
        assert call[1]["text"].lstrip("\n") == 'a <b> </parameter> "c"\nd'
    assert run.answer() == "I will."


@pytest.mark.parametrize(("least", "most"), [(0, 0), (0, 4), (3, 3), (1, 200)])
def test_short_strings_are_held_to_their_length(least: int, most: int) -> None:
    title = {"type": "string", "minLength": least, "maxLength": most}
    wanted = request(
        tools=(tool("commit", {"title": title, "body": {"type": "string"}}),),
        tool_choice=ToolChoice.NAMED,
        tool_name="commit",
    )
    for seed in range(4):
        run = Run(wanted, seed=seed, free=lambda text: "" if "</f" in text else "b\n</parameter>")
        run.finish(3000)
        ((_, arguments),) = run.calls("<tool_call>\n<function=commit>\n")
        assert least <= len(arguments["title"]) <= most
        assert arguments["body"].strip() == "b"


def test_long_strings_stay_free() -> None:
    """Lengths that would need a mask at every position are the model's business."""
    for limits in ({"minLength": 1}, {"maxLength": 5000}, {"minLength": 2, "maxLength": 201}):
        free = {"type": "string", **limits}
        run = Run(request(tools=(tool("write", {"text": free}),)))
        run.say("<tool_call>\n<function=write>\n<parameter=text>\n")
        assert len(allowed(run.guide.mask)) > nano().size


def test_no_mask_inside_of_free_text() -> None:
    run = Run(request(tools=(EDIT,)))
    run.say("Fine.")
    assert run.guide.mask is None
    run.say(HEAD + "<parameter=text>\n")
    free = run.guide.version
    assert not allows(run.guide.mask, nano().end_of_turn_ids[0])
    assert len(allowed(run.guide.mask)) > nano().size
    run.say("x </parameter> y\n</param>\n<parameter")
    assert run.guide.version == free
    run.say("\n</parameter>")
    assert allowed(run.guide.mask) == ids_of("\n")
    run.say("\n<parameter=")
    keys = {nano().token_bytes(i).decode() for i in allowed(run.guide.mask)}
    assert all("mode line code flags where note".find(key) >= 0 for key in keys), keys
    assert "text" not in keys


def test_quoted_calls_in_a_value_do_not_end_it() -> None:
    quoted = (
        "How to call:\n<tool_call>\n<function=edit>\n<parameter=text>\nhi\n</parameter>\n"
        "</function>\n</tool_call>\nThat is it."
    )
    run = Run(request(tools=(tool("say", {"text": {"type": "string"}}),)))
    run.say(f"<tool_call>\n<function=say>\n<parameter=text>\n{quoted}\n</parameter>\n")
    run.say("</function>\n</tool_call>")
    assert run.guide.mask is None
    assert run.calls() == [("say", {"text": quoted})]


def test_a_required_parameter_cannot_be_left_out_nor_given_twice() -> None:
    run = Run(request(tools=(EDIT,)))
    run.say(HEAD)
    assert not allows(run.guide.mask, ids_of("</")[0])
    run.say("<parameter=mode>\nread\n</parameter>\n<parameter=line>\n7\n</parameter>\n")
    run.say("<parameter=code>\nab\n</parameter>\n<parameter=flags>\n[true, false]\n</parameter>\n")
    assert not allows(run.guide.mask, ids_of("</")[0])
    run.say("<parameter=text>\n\n</parameter>\n")
    assert allows(run.guide.mask, ids_of("</")[0])
    run.say("<parameter=where>\n")
    assert {nano().token_bytes(i)[:1] for i in allowed(run.guide.mask)} >= {b"t", b"e", b"n", b"1"}
    run.say("top\n</parameter>\n<parameter=note>\nnull\n</parameter>\n")
    assert set(allowed(run.guide.mask)) == {ids_of("</")[0]} or b"</" in {
        nano().token_bytes(i) for i in allowed(run.guide.mask)
    }
    run.say("</function>\n</tool_call>")
    ((name, arguments),) = run.calls()
    assert name == "edit"
    assert fits_edit(arguments)
    assert (arguments["text"], arguments["where"], arguments["note"]) == ("", "top", None)


def test_tools_that_are_not_strict_stay_free_beside_strict_ones() -> None:
    run = Run(request(tools=(EDIT, LOOSE)))
    run.say(
        "<tool_call>\n<function=loose>\n<parameter=other>\n<tool_call> is a tag\n</parameter>\n"
    )
    assert run.guide.mask is None
    run.say("</function>\n</tool_call>\n<tool_call>")
    assert run.guide.mask is not None, "the next call is looked at again"
    run.say("\n<function=")
    run.say("edit>\n")
    assert not allows(run.guide.mask, ids_of("</")[0])


def test_a_call_in_reasoning_is_held_once_it_is_one() -> None:
    run = Run(request(tools=(EDIT,), reasoning_budget=60), thinking=True)
    run.say("I could write <tool_call> here.\n<tool_call>\n<function=")
    assert run.guide.mask is None
    run.say("edit>\n")
    assert run.guide.mask is not None
    run.say("<parameter=text>\nx\n</parameter>\n<parameter=mode>\n")
    assert not allows(run.guide.mask, ids_of("x")[0])
    run.say("read\n</parameter>\n" + "<parameter=line>\n1\n</parameter>\n")
    assert run.forced == [], "the budget is for reasoning only"


def test_required_masks_the_name_and_nothing_more() -> None:
    opening = "<tool_call>\n<function="
    wanted = request(
        tools=(LOOSE, tool("other", {}, strict=False)), tool_choice=ToolChoice.REQUIRED
    )
    for seed in range(4):
        run = Run(wanted, seed=seed)
        while run.guide.mask is not None:
            run.give(run.draw(allowed(run.guide.mask)))
        assert run.text in ("loose>\n", "other>\n")
        run.say("<parameter=anything>\n1\n</parameter>\n</function>\n</tool_call>")
        assert run.calls(opening)[0][1] == {"anything": "1"}


OTHER = tool("other", {"text": {"type": "string"}}, strict=False)


@pytest.mark.parametrize("thinking", [False, True])
def test_only_allowed_tools_are_called(thinking: bool) -> None:
    """Neither of the two is strict; the prompt shows both."""
    wanted = request(tools=(LOOSE, OTHER), allowed_tools=frozenset({"other"}))
    for seed in range(3):
        run = Run(wanted, seed=seed, thinking=thinking)
        assert run.guide.mask is None
        if thinking:
            run.say("a <tool_call>\n<function=loose> in thought</think>\n\n")
        run.say("Let me see.\n<tool_call>")
        while run.guide.mask is not None:
            run.give(run.draw(allowed(run.guide.mask)))
        assert run.text.endswith("<tool_call>\n<function=other>\n")
        run.say("<parameter=text>\n<tool_call> is a tag\n</parameter>\n</function>\n")
        assert run.guide.mask is None, "quoted calls are text"
        run.say("</tool_call>\n<tool_call>")
        assert run.guide.mask is not None, "the next call is looked at again"


def test_a_required_call_of_an_allowed_tool() -> None:
    wanted = request(
        tools=(LOOSE, OTHER, EDIT),
        tool_choice=ToolChoice.REQUIRED,
        allowed_tools=frozenset({"other", "edit"}),
    )
    seen = set()
    for seed in range(12):
        run = Run(wanted, seed=seed)
        while run.guide.mask is not None and not run.text.endswith(">\n"):
            run.give(run.draw(allowed(run.guide.mask)))
        seen.add(run.text)
    assert seen == {"other>\n", "edit>\n"}


def test_named_strict_tool_starts_inside_its_call() -> None:
    run = Run(
        request(tools=(EDIT, LOOSE), tool_choice=ToolChoice.NAMED, tool_name="edit"),
        free=lambda text: "" if text.endswith("</tool_call>") else "t\n</parameter>",
    )
    run.finish(3000)
    assert fits_edit(run.calls(HEAD)[0][1])


def test_an_answer_may_be_a_call_where_tools_are_on_offer() -> None:
    wanted = request(tools=(EDIT,), response_format=ResponseFormat(SCHEMAS[1][0]))
    run = Run(wanted)
    assert allows(run.guide.mask, id_of(CALL_OPEN))
    run.say('"yes')
    assert not allows(run.guide.mask, id_of(CALL_OPEN))
    run = Run(wanted)
    run.say(HEAD + "<parameter=mode>\n")
    assert not allows(run.guide.mask, ids_of("x")[0])
    without = Run(request(tools=(EDIT,), tool_choice=ToolChoice.NONE,
                          response_format=ResponseFormat(SCHEMAS[1][0])))  # fmt: skip
    assert not allows(without.guide.mask, id_of(CALL_OPEN))


@pytest.mark.parametrize(
    ("schema", "part"),
    [({"type": "integer", "not": {}}, "not"), ({"type": "string", "pattern": "(?=a)b"}, "look"),
     ({"enum": []}, "enum")],
)  # fmt: skip
def test_a_strict_tool_that_cannot_be_compiled_is_named(schema: Any, part: str) -> None:
    wanted = request(tools=(LOOSE, tool("bad", {"fine": {"type": "string"}, "p": schema})))
    with pytest.raises(InvalidRequest, match=f"bad .*parameter p: .*{part}") as caught:
        guides().make_now(wanted, False)
    assert caught.value.param == "tools[1]"


# ---------------------------------------------------------------- the reasoning budget


@pytest.mark.parametrize("last", ["words of it", "words of it\n"])
def test_a_budget_closes_the_reasoning(last: str) -> None:
    ids = ids_of("Let me think about " + last)
    run = Run(request(reasoning_budget=len(ids)), thinking=True)
    assert run.guide.mask is None
    for token in ids[:-1]:
        assert run.give(token) == []
    forced = run.give(ids[-1])
    expected = "</think>\n\n" if last.endswith("\n") else "\n</think>\n\n"
    assert b"".join(map(nano().token_bytes, forced)).decode() == expected
    assert id_of(THINK_CLOSE) in forced
    # Nothing but text or a call comes next.
    for end in (*nano().end_of_turn_ids, id_of(THINK_CLOSE), id_of("<think>")):
        assert not allows(run.guide.mask, end)
    run.say("\n")
    assert not allows(run.guide.mask, nano().end_of_turn_ids[0])
    run.say("Yes")
    assert run.guide.mask is None


def test_a_budget_that_is_not_reached_changes_nothing() -> None:
    run = Run(request(reasoning_budget=50), thinking=True)
    run.say("Short.\n</think>\n\nAnswer" + " and" * 60)
    assert run.forced == []
    assert run.guide.mask is None
    assert run.guide.version == 0


def test_a_budget_before_json_and_before_a_call() -> None:
    schema = SCHEMAS[1][0]
    run = Run(request(reasoning_budget=3, response_format=ResponseFormat(schema)), thinking=True)
    run.say("one two three")
    assert run.forced
    assert not allows(run.guide.mask, ids_of("\n")[0])
    run.finish()
    assert run.answer() in ('"yes"', '"no"')
    run = Run(request(reasoning_budget=3, tools=(EDIT,)), thinking=True)
    run.say("one two three" + HEAD)
    assert not allows(run.guide.mask, ids_of("</")[0])


async def test_requests_without_rules_have_no_guide() -> None:
    loose = request(tools=(LOOSE,))
    assert await guides().make(request(), thinking_open=True) is None
    assert await guides().make(loose, thinking_open=True) is None
    assert await guides().make(request(reasoning_budget=5), thinking_open=False) is None
    assert await guides().make(request(reasoning_budget=5), thinking_open=True) is not None
    few = request(tools=(LOOSE, EDIT), allowed_tools=frozenset({"loose"}))
    assert await guides().make(few, thinking_open=False) is not None
    none = request(tools=(EDIT,), tool_choice=ToolChoice.NONE)
    assert await guides().make(none, thinking_open=True) is None


def test_an_id_outside_of_the_mask_ends_the_hold() -> None:
    """Forced output may say anything."""
    run = Run(request(response_format=ResponseFormat()))
    run.guide.advance(ids_of("no"))
    assert run.guide.wait(10.0)
    assert run.guide.mask is None


def test_a_grammar_that_grows_too_large_fails_the_generation() -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
    guide = guides().make_now(request(response_format=ResponseFormat(many)), False)
    heard: list[KslError] = []
    guide.when_failed(heard.append)
    guide.advance(ids_of("{"))
    assert not guide.wait(30.0)
    assert guide.failed
    for _ in range(2):
        guide.when_failed(heard.append)  # late listeners hear of it, too
    assert {error.status for error in heard} == {500}
    guide.when_ready(lambda: pytest.fail("it never is"))


def test_grammars_and_masks_are_made_by_the_workers() -> None:
    made = guides().make_now(request(tools=(EDIT,)), False)
    queued: list[Constraint] = []
    guide = Constraint(made.kit, made.rules, queued.append)
    assert guide.ready, "free text needs nothing"
    compiled: list[str] = []
    found = guides().grammars.matcher

    class Spy:
        words = guides().grammars.words
        ids = staticmethod(guides().grammars.ids)

        @staticmethod
        def matcher(grammar: str) -> Any:
            compiled.append(grammar)
            return found(grammar)

    guide.kit = copy.copy(made.kit)
    guide.kit.grammars = Spy  # type: ignore[assignment]
    guide.advance([id_of(CALL_OPEN)])
    assert queued == [guide]
    assert not guide.ready
    assert not compiled
    guide.work()
    assert guide.ready
    assert len(compiled) == 1


def test_a_fault_in_following_ends_only_this_generation() -> None:
    run = Run(request(tools=(EDIT,)))
    heard: list[KslError] = []
    run.guide.when_failed(heard.append)
    assert run.guide.advance([10**9]) == []  # no id of any vocabulary
    run.guide.kit = None  # type: ignore[assignment]
    assert run.guide.advance([1]) == []
    assert not run.guide.ready
    assert [error.status for error in heard] == [500]


def test_a_budget_alone_needs_no_grammar() -> None:
    grammars = Grammars(nano(), nano().size)
    fresh = Guides(nano(), grammars)
    assert fresh.make_now(request(reasoning_budget=5), True).ready
    assert not grammars.built
    fresh.make_now(request(response_format=ResponseFormat()), False)
    assert grammars.built
    fresh.close()


def test_callbacks() -> None:
    heard: list[str] = []
    run = Run(request(response_format=ResponseFormat()))
    run.guide.when_ready(lambda: heard.append("ready"))
    assert heard == ["ready"], "it is ready already"
    run.guide.when_failed(lambda error: heard.append(error.code))
    run.give(ids_of("{")[0])
    assert heard == ["ready"], "one call each"


def test_a_tokenizer_that_the_library_does_not_take() -> None:
    """It panics over tokens that are too long; that is a refusal like any other."""

    class Long:
        def __init__(self) -> None:
            self.bytes_of = [*nano().bytes_of, *(b"ab" * n for n in range(2000))]
            self.size = len(self.bytes_of)

        def __getattr__(self, name: str) -> Any:
            return getattr(nano(), name)

    grammars = Grammars(cast(Any, Long()), Long().size)
    with pytest.raises(GrammarError, match="cannot be had with this tokenizer"):
        grammars.build()
