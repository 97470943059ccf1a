"""Runs cases of the kinds `parser`, `stop` and `bytes`, each with many ways of cutting it."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from kslserve.core.events import ToolCallDelta
from kslserve.core.usage import FinishReason
from kslserve.parse.stops import StopMatcher
from kslserve.parse.stream import OutputParser
from kslserve.text.detokenizer import Detokenizer
from kslserve.text.tokenizer import Tokenizer
from tests.runners.files import Case, outcomes
from tests.unit.parse.parse_support import Output, collect, cut, parse, specs

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def run_parser(case: Case) -> None:
    results = []
    tools = specs(case["tools"])
    enabled = case.get("tool_choice", "auto") != "none"
    for pieces in cuts_of(case, (1, 2, 3, 5, 9, 20)):
        got = parse(
            pieces,
            tools,
            thinking=case["thinking"],
            tools_enabled=enabled,
            reason=REASONS[case["end"]],
        )
        assert any(fits(case, expect, got) for expect in outcomes(case)), f"{pieces}: {got}"
        results.append(got.merged)
    assert all(result == results[0] for result in results), "the cuts change the result"
    if "stream" in case:
        _run_stream(case)


def run_stop(case: Case) -> None:
    want = (case["expect"]["text"], case["expect"]["matched"])
    for pieces in cuts_of(case, (1, 2, 3, 5)):
        got = stopped(case["stop"], pieces)
        assert got == want, f"{pieces}: {got}"


def run_bytes(case: Case, tokenizer: Tokenizer) -> None:
    pieces = [bytes.fromhex(piece) for piece in case["pieces_hex"]]
    for cut_pieces in (pieces, [bytes([byte]) for byte in b"".join(pieces)]):
        detokenizer = Detokenizer(tokenizer)
        deltas = [detokenizer.feed_bytes(piece) for piece in cut_pieces]
        deltas.append(detokenizer.flush())
        assert "".join(deltas) == case["expect"]["text"], deltas
        for delta in deltas:
            assert delta.encode().decode() == delta
        assert not (case["expect"].get("no_replacement") and "\ufffd" in "".join(deltas))


def cuts_of(case: Case, sizes: tuple[int, ...]) -> list[list[str]]:
    """The chunks as given, in one piece, by character, and at random places."""
    whole = "".join(case["chunks"])
    dice = random.Random(case["id"])
    cuts = [case["chunks"], [whole], list(whole)]
    return cuts + [
        cut(whole, dice.sample(range(len(whole)), min(len(whole), size))) for size in sizes
    ]


def stopped(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """(text that was sent, the stop string or None)"""
    matcher = StopMatcher(stops)
    sent = ""
    for piece in pieces:
        emitted, matched = matcher.feed(piece)
        sent += emitted
        if matched is not None:
            assert matcher.feed("more") == ("", matched)
            assert matcher.flush() == ""
            return sent, matched
    return sent + matcher.flush(), None


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


def fits(case: Case, expect: dict[str, Any], got: Output) -> bool:
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


def _run_stream(case: Case) -> None:
    """What must have been sent before the last chunk, for the chunks as given."""
    ids = itertools.count()
    parser = OutputParser(
        specs(case["tools"]), thinking=case["thinking"], make_id=lambda: f"call_{next(ids)}"
    )
    events = [event for piece in case["chunks"][:-1] for event in parser.feed(piece)]
    seen = collect(events)
    for text in case["stream"].get("content_seen_before_last_chunk", ()):
        assert text in seen.content, f"{text!r} is held back"
    fragments = sum(isinstance(event, ToolCallDelta) and event.index == 0 for event in events)
    least = case["stream"].get("min_argument_fragments", 0)
    assert fragments >= least, f"{fragments} fragments of arguments, not {least}"
