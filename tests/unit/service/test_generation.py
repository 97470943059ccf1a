"""Generation: sampled ids in, events out."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.api.merge import merge
from kslserve.core.events import (
    Event,
    Failed,
    Finished,
    LogprobsDelta,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from kslserve.core.request import ToolSpec
from kslserve.core.usage import FinishReason
from kslserve.errors import KslError, Unavailable
from kslserve.parse.stream import OutputParser
from kslserve.service.generation import Generation
from kslserve.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2] / "data"
CALL = "<tool_call>\n<function=ls>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"
TOOL = ToolSpec(
    "ls", {}, {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer((DATA / "nano_tokenizer.json").read_bytes())


class Run:
    """A generation and what it said."""

    def __init__(
        self, *, thinking: bool = False, tools: tuple[ToolSpec, ...] = (), **more: Any
    ) -> None:
        self.batches: list[list[Event]] = []
        self.cancels: list[KslError | None] = []
        self.ends: list[Generation] = []
        self.stop_id = tokenizer().end_of_turn_ids[0]
        numbers = itertools.count()
        options: dict[str, Any] = {
            "stops": (),
            "prompt_tokens": 7,
            "max_new_tokens": 10_000,
            "stop_ids": tokenizer().end_of_turn_ids,
            "seed": 1,
            **more,
        }
        self.generation = Generation(
            tokenizer=tokenizer(),
            parser=OutputParser(tools, thinking=thinking, make_id=lambda: f"call_{next(numbers)}"),
            on_events=self.batches.append,
            on_ended=self.ends.append,
            **options,
        )
        self.generation.attach(self.cancels.append)

    def say(self, text: str, *, at_once: bool = False) -> None:
        ids = [int(i) for i in tokenizer().encode(text)]
        for part in [ids] if at_once else [[i] for i in ids]:
            self.generation.tokens(part, None)

    def end(self, reason: FinishReason = FinishReason.STOP) -> None:
        if reason is FinishReason.STOP:
            self.generation.tokens([self.stop_id], None)
        self.generation.ended(reason, None)

    @property
    def events(self) -> list[Event]:
        return merge(event for batch in self.batches for event in batch)

    def text(self, kind: type = TextDelta) -> str:
        return "".join(e.text for e in self.events if isinstance(e, kind))

    @property
    def last(self) -> Event:
        return self.batches[-1][-1]


def test_a_plain_answer() -> None:
    run = Run()
    run.generation.admitted(0)
    run.say("Hello there, café.")
    run.end()
    assert run.events == [
        Started(),
        TextDelta("Hello there, café."),
        Finished(FinishReason.STOP, run.generation.usage),
    ]
    assert run.generation.usage.prompt_tokens == 7
    assert (
        run.generation.usage.completion_tokens == len(tokenizer().encode("Hello there, café.")) + 1
    )
    assert run.generation.usage.reasoning_tokens == 0
    assert run.ends == [run.generation]
    assert run.generation.done


def test_the_last_wave_is_one_batch() -> None:
    run = Run(max_new_tokens=2)
    run.generation.tokens([int(i) for i in tokenizer().encode("a b")][:1], None)
    before = len(run.batches)
    run.generation.tokens([int(i) for i in tokenizer().encode("a b")][1:2], None)
    assert len(run.batches) == before
    run.end(FinishReason.LENGTH)
    assert len(run.batches) == before + 1
    assert run.text() == "a b"
    assert isinstance(run.last, Finished)
    assert run.last.reason is FinishReason.LENGTH


@pytest.mark.parametrize("at_once", [False, True])
def test_reasoning_is_counted(at_once: bool) -> None:
    run = Run(thinking=True)
    run.say("two and two\n</think>\n\nFour.", at_once=at_once)
    run.end()
    assert run.text(ReasoningDelta).strip() == "two and two"
    assert run.text() == "Four."
    reasoning = len(tokenizer().encode("two and two\n</think>"))
    assert run.generation.usage.reasoning_tokens == reasoning


def test_a_turn_that_ends_in_its_reasoning() -> None:
    run = Run(thinking=True)
    run.say("hm")
    run.end()
    assert run.generation.usage.reasoning_tokens == run.generation.usage.completion_tokens


def test_a_call() -> None:
    run = Run(tools=(TOOL,))
    run.say("Let me see.\n\n" + CALL)
    run.end()
    assert run.text().strip() == "Let me see."
    starts = [e for e in run.events if isinstance(e, ToolCallStart)]
    assert starts == [ToolCallStart(0, "call_0", "ls")]
    json = "".join(e.json for e in run.events if isinstance(e, ToolCallDelta))
    assert json == '{"path": "a"}'
    assert isinstance(run.last, Finished)
    assert run.last.reason is FinishReason.TOOL_CALLS


def test_the_limit_beats_a_call() -> None:
    run = Run(tools=(TOOL,))
    run.say(CALL[:60])
    run.end(FinishReason.LENGTH)
    assert isinstance(run.last, Finished)
    assert run.last.reason is FinishReason.LENGTH


def test_only_one_call_where_only_one_is_allowed() -> None:
    run = Run(tools=(TOOL,), one_call=True)
    run.say(CALL + "\n" + CALL)
    assert isinstance(run.last, Finished)
    assert run.last.reason is FinishReason.TOOL_CALLS
    assert sum(isinstance(e, ToolCallEnd) for e in run.events) == 1
    assert run.cancels == [None]
    batches = len(run.batches)
    run.generation.ended(FinishReason.CANCELLED, None)
    assert len(run.batches) == batches
    assert len(run.ends) == 1


def test_a_forced_opening_is_parsed_and_not_counted() -> None:
    run = Run(tools=(TOOL,), opening="<tool_call>\n<function=ls>\n")
    run.generation.admitted(0)
    run.say(CALL.removeprefix("<tool_call>\n<function=ls>\n"))
    run.end()
    assert [e.name for e in run.events if isinstance(e, ToolCallStart)] == ["ls"]
    rest = CALL.removeprefix("<tool_call>\n<function=ls>\n")
    assert run.generation.usage.completion_tokens == len(tokenizer().encode(rest)) + 1


def test_a_stop_string_ends_it() -> None:
    run = Run(stops=("STOP", "never"))
    run.say("one two STOP three")
    assert run.text() == "one two "
    assert run.last == Finished(FinishReason.STOP_STRING, run.generation.usage, "STOP")
    assert run.cancels == [None]


def test_stop_strings_leave_reasoning_and_calls_alone() -> None:
    run = Run(thinking=True, tools=(TOOL,), stops=("a", "two"))
    run.say("two a\n</think>\n\n" + CALL)
    run.end()
    assert run.text(ReasoningDelta).strip() == "two a"
    assert isinstance(run.last, Finished)
    assert run.last.reason is FinishReason.TOOL_CALLS


def test_text_held_for_a_stop_string_comes_before_the_call() -> None:
    run = Run(tools=(TOOL,), stops=("see!",))
    run.say("I see\n\n" + CALL)
    run.end()
    kinds = [type(e) for e in run.events]
    assert run.text().strip() == "I see"
    assert kinds.index(ToolCallStart) > max(i for i, k in enumerate(kinds) if k is TextDelta)


def test_text_held_at_the_end_is_sent() -> None:
    run = Run(stops=("endless",))
    run.say("the end")
    run.end()
    assert run.text() == "the end"
    assert isinstance(run.last, Finished)
    assert run.last.reason is FinishReason.STOP


def test_a_character_cut_by_the_limit() -> None:
    ids = [int(i) for i in tokenizer().encode("ok 🦉")]
    run = Run(max_new_tokens=len(ids) - 1)
    for token in ids[:-1]:
        run.generation.tokens([token], None)
    run.end(FinishReason.LENGTH)
    assert run.text().startswith("ok ")
    assert "🦉" not in run.text()


def test_log_probabilities_cover_the_answer_only() -> None:
    run = Run(thinking=True)
    ids = [int(i) for i in tokenizer().encode("so\n</think>\n\nHé")]
    for token in ids:
        run.generation.tokens([token], [[(token, -0.5), (token, -0.5), (5, -2.0)]])
    run.generation.tokens([run.stop_id], [[(run.stop_id, -0.1)]])
    run.generation.ended(FinishReason.STOP, None)
    entries = [x for e in run.events if isinstance(e, LogprobsDelta) for x in e.entries]
    after = ids[ids.index(tokenizer().id_of("</think>") or -1) + 1 :]
    assert [entry.token_id for entry in entries] == after
    assert b"".join(entry.token for entry in entries).strip() == "Hé".encode()
    assert entries[0].top[1] == (tokenizer().token_bytes(5), 5, -2.0)


def test_failure_and_cancellation() -> None:
    run = Run()
    run.say("so far")
    error = Unavailable("gone")
    run.generation.ended(FinishReason.CANCELLED, error)
    assert run.last == Failed(error, run.generation.usage)
    assert run.generation.error is error
    run.generation.cancel()
    assert run.cancels == []
    run = Run()
    run.generation.cancel(error)
    assert run.cancels == [error]
    run.generation.ended(FinishReason.CANCELLED, None)
    assert isinstance(run.last, Finished)
    assert run.last.reason is FinishReason.CANCELLED


TEXTS = st.lists(
    st.sampled_from(["a", "b", " ab", "aab", "</think>", "\n\n", CALL, "🦉", "é", "<", "x"]),
    max_size=8,
).map("".join)


@given(TEXTS, st.booleans(), st.booleans(), st.data())
def test_waves_of_any_size_give_the_same_answer(
    text: str, thinking: bool, one_call: bool, data: st.DataObject
) -> None:
    """Counts included: what a wave brings behind a stop string, or the only call, is not there."""
    ids = [int(i) for i in tokenizer().encode(text)]
    runs = []
    for single in (True, False):
        run = Run(thinking=thinking, tools=(TOOL,), stops=("bab",), one_call=one_call)
        at = 0
        while at < len(ids):
            n = 1 if single else data.draw(st.integers(1, 4))
            run.generation.tokens(ids[at : at + n], None)
            at += n
        run.end()
        runs.append(run)
    assert runs[0].events == runs[1].events
    assert runs[0].generation.usage == runs[1].generation.usage
    assert runs[0].cancels == runs[1].cancels
