"""Stop strings across pieces, against a reference that looks at every character."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kslserve.parse.stops import StopMatcher
from tests.runners.parser_cases import stopped as run
from tests.unit.parse.parse_support import cut


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held(stops: list[str], text: str) -> int:
    """The least that must be held after `text`, which holds no match."""
    ends = (
        n
        for n in range(len(text), 0, -1)
        if any(s != text[-n:] and s.startswith(text[-n:]) for s in stops)
    )
    return next(ends, 0)


STOPS = st.lists(st.text("ab]^", max_size=4), max_size=4)


@settings(max_examples=300)
@given(STOPS, st.text("ab]^c", max_size=20), st.lists(st.integers(0, 20), max_size=5))
def test_like_the_reference(stops: list[str], text: str, places: list[int]) -> None:
    want = reference(stops, text)
    for pieces in ([text], list(text), cut(text, places)):
        assert run(stops, pieces) == want


@settings(max_examples=200)
@given(STOPS, st.text("ab]^c", max_size=12))
def test_no_more_than_needed_is_held(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for place, letter in enumerate(text):
        emitted, matched = matcher.feed(letter)
        sent += emitted
        if matched is not None:
            return
        assert len(sent) == place + 1 - held(stops, text[: place + 1])


def test_without_stops_everything_passes() -> None:
    matcher = StopMatcher([""])
    assert matcher.feed("text") == ("text", None)
    assert matcher.matched is None
    assert matcher.flush() == ""
