"""EchoTable: a turn that comes back is known by its value, and by nothing less."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.core.request import Message, Role, ToolCall
from kslserve.service.echo import EchoTable, Turn, contexts

HERE, ELSEWHERE = b"here", b"elsewhere"
LS = ToolCall("call_1", "ls", {"path": "a", "deep": {"n": [1, None, True]}})
CAT = ToolCall("call_2", "cat", {"path": "b"})


def turn(number: int, text: str = "", reasoning: str = "", *calls: ToolCall) -> Turn:
    return Turn(np.array([number], np.int32), text, reasoning, calls)


def said(text: str = "", reasoning: str | None = None, *calls: ToolCall) -> Message:
    return Message(Role.ASSISTANT, text, reasoning, calls)


def found(table: EchoTable, message: Message, context: bytes = HERE) -> int | None:
    ids = table.find(message, context)
    return None if ids is None else int(ids[0])


def table_of(*turns: Turn) -> EchoTable:
    table = EchoTable()
    for each in turns:
        table.record(each, HERE)
    return table


def with_arguments(**arguments: Any) -> ToolCall:
    return dataclasses.replace(LS, arguments=arguments)


@pytest.mark.parametrize(
    "echo",
    [
        said("Look.", "think", LS, CAT),
        said(" Look.\n", "\nthink ", LS, CAT),
        said("Look.", None, LS, CAT),
        said("Look.", "", LS, CAT),
        said("Look.", "think", with_arguments(deep={"n": [1.0, None, True]}, path="a"), CAT),
        said("<think>\nthink\n</think>\n\nLook.", None, LS, CAT),
    ],
)
def test_calls_that_come_back(echo: Message) -> None:
    table = table_of(turn(7, "Look.", "think", LS, CAT))
    assert found(table, echo) == 7
    assert found(table, echo, b"elsewhere") == 7


@pytest.mark.parametrize(
    "echo",
    [
        said("Look!", "think", LS, CAT),
        said("", "think", LS, CAT),
        said("Look.", "thought", LS, CAT),
        said("Look.", "think", LS),
        said("Look.", "think"),
        said("Look.", "think", CAT, LS),
        said("Look.", "think", LS, dataclasses.replace(CAT, call_id="call_3")),
        said("Look.", "think", dataclasses.replace(LS, name="dir"), CAT),
        said("Look.", "think", with_arguments(path="a"), CAT),
        said("Look.", "think", with_arguments(path="a", deep={"n": [1, None, 1]}), CAT),
        said("Look.", "think", with_arguments(path="a", deep={"n": [True, None, True]}), CAT),
        said("Look.", "think", with_arguments(path="a", deep={"n": [1, None]}), CAT),
        said("Look.", "think", with_arguments(path="a", deep=[1]), CAT),
        said("<think>\nthought\n</think>\n\nLook.", None, LS, CAT),
    ],
)
def test_calls_that_were_changed(echo: Message) -> None:
    table = table_of(turn(7, "Look.", "think", LS, CAT))
    assert found(table, echo) is None


def test_text_with_its_reasoning_is_known_anywhere() -> None:
    table = table_of(turn(1, "Done.", "easy"), turn(2, "Done.", "hard"), turn(3, "Done."))
    assert found(table, said("Done.", " easy"), b"elsewhere") == 1
    assert found(table, said("Done.", "hard"), b"elsewhere") == 2
    assert found(table, said("Done.", "other"), HERE) is None
    assert found(table, said("<think>easy</think>Done."), b"elsewhere") == 1


def test_text_without_its_reasoning_is_known_in_its_conversation() -> None:
    """Two conversations had the same answer for different reasons."""
    table = EchoTable()
    table.record(turn(1, "Done.", "easy"), b"one")
    table.record(turn(2, "Done.", "hard"), b"two")
    assert found(table, said("Done."), b"one") == 1
    assert found(table, said("Done.", ""), b"two") == 2
    assert found(table, said("Done."), b"three") is None
    table.record(turn(3, "Done."), b"three")
    assert found(table, said("Done."), b"four") == 3
    assert found(table, said("Done."), b"one") == 1


def test_the_newest_of_equal_turns() -> None:
    table = table_of(turn(1, "Done.", "easy"), turn(2, "Done.", "easy"))
    assert found(table, said("Done.", "easy")) == 2


def test_the_least_recently_used_goes_first() -> None:
    table = EchoTable(20_000)
    table.record(turn(0, "kept", "r"), HERE)
    for number in range(1, 100):
        table.record(turn(number, f"text {number}", "r"), HERE)
        assert found(table, said("kept", "r")) == 0
        assert table.size_bytes <= 20_000
    assert found(table, said("text 1", "r")) is None
    assert found(table, said("text 1")) is None
    assert found(table, said("text 99", "r")) == 99
    table.record(turn(100, "x" * 30_000), HERE)
    assert found(table, said("x" * 30_000)) is None
    assert found(table, said("kept", "r")) == 0


def test_the_space_of_a_replaced_turn_comes_back() -> None:
    table = EchoTable(20_000)
    for number in range(200):
        table.record(turn(number, "same", "r"), HERE)
        assert found(table, said("same", "r")) == number
    assert table.size_bytes <= 20_000


def test_an_answer_that_is_said_again_takes_no_more_space() -> None:
    table = EchoTable()
    table.record(turn(1, "same"), HERE)
    size = table.size_bytes
    table.record(turn(2, "same"), HERE)
    assert table.size_bytes == size
    # Elsewhere it is another turn: each conversation finds its own.
    table.record(turn(3, "same"), ELSEWHERE)
    assert table.size_bytes == 2 * size
    assert [found(table, said("same"), where) for where in (HERE, ELSEWHERE)] == [2, 3]


# ------------------------------------------------------------ contexts

SYSTEM = Message(Role.SYSTEM, "Be brief.")
USER = Message(Role.USER, "List it.")
RESULT = Message(Role.TOOL, "a\nb", call_id="call_1")
HISTORY = (SYSTEM, USER, said("Look.", "think", LS), RESULT, said("Two files.", "count"), USER)


def last(*messages: Message) -> bytes:
    return list(contexts(messages))[-1]


@pytest.mark.parametrize(
    "same",
    [
        (SYSTEM, USER, said("Look.", None, LS), RESULT, said("Two files."), USER),
        (SYSTEM, USER, said(" Look.", "other", LS), RESULT, said("Two files.\n"), USER),
        (
            SYSTEM,
            USER,
            said("<think>think</think>Look.", None, LS),
            Message(Role.TOOL, "b"),
            said("Two files."),
            USER,
        ),
        (*HISTORY[:2], Message(Role.SYSTEM, "Reminder."), *HISTORY[2:]),
        (*HISTORY, said()),
    ],
)
def test_one_conversation(same: tuple[Message, ...]) -> None:
    assert last(*same) == last(*HISTORY)


@pytest.mark.parametrize(
    "other",
    [
        HISTORY[1:],
        HISTORY[:-1],
        (*HISTORY[:2], said("Look.", "think", CAT), *HISTORY[3:]),
        (*HISTORY[:2], said("Look!", "think", LS), *HISTORY[3:]),
        (*HISTORY[:-1], Message(Role.USER, "List it again.")),
        (*HISTORY[:-1], said("List it.")),
        (Message(Role.USER, "Be brief."), *HISTORY[1:]),
    ],
)
def test_another_conversation(other: tuple[Message, ...]) -> None:
    assert last(*other) != last(*HISTORY)


@given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
def test_contexts_tell_messages_apart(one: list[str], two: list[str]) -> None:
    left, right = ([Message(Role.USER, text) for text in texts] for texts in (one, two))
    same = [text.strip() for text in one] == [text.strip() for text in two]
    assert (last(*left) == last(*right)) == same
    assert len(list(contexts(left))) == len(left) + 1
