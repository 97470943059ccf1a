"""SegmentCache: the same ids as without it, whatever it remembers, and turns spliced in."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kslserve.core.request import Message, Role
from kslserve.text.rendered import Rendered
from kslserve.text.segments import SegmentCache, Splice
from kslserve.text.template import ChatTemplate, bundled
from kslserve.text.tokenizer import Tokenizer
from tests.unit.text.text_support import nano, qwen

WORDS = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|im_", "im_end|>", "<"),
    *("user\n", "Hello", " world", "def f(x):", "\n", "\n\n", "    ", "12", " 5", "é", "e\u0301"),
    *("한국어", "😀", "…", "\ud800"),
)
TEXT = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=16).map("".join)
SMALL = SegmentCache(nano(), 4000)
LARGE = SegmentCache(nano())


@settings(max_examples=300, deadline=None)
@given(TEXT, st.data())
def test_ids_are_those_of_the_whole_text(text: str, data: st.DataObject) -> None:
    """With breaks anywhere, and with caches that hold what other texts left in them."""
    places = data.draw(st.sets(st.integers(0, len(text)), max_size=4))
    rendered = Rendered(text, False, breaks=tuple(sorted(places)))
    want = nano().encode_rendered(rendered).tolist()
    for cache in (SMALL, LARGE, LARGE):
        ids = cache.encode(rendered).ids
        assert ids.dtype == np.int32
        assert ids.tolist() == want
    assert SMALL.size_bytes <= 4000


@pytest.fixture(scope="module")
def conversations() -> list[Rendered]:
    """300 random conversations, of which many share turns, each rendered; in half of them somebody
    typed control tokens."""
    rng = random.Random(7)
    template = ChatTemplate(bundled("3.8"))
    words = [word for word in WORDS if word != "\ud800"]

    def turn(words: list[str]) -> tuple[Message, Message]:
        texts = ["".join(rng.choices(words, k=rng.randint(1, 10))) for _ in range(3)]
        return (
            Message(Role.USER, "q" + texts[0]),
            Message(Role.ASSISTANT, texts[1], reasoning=texts[2]),
        )

    plain = [word for word in words if "<" not in word and ">" not in word]
    turns = [[turn(plain) for _ in range(30)], [turn(words) for _ in range(30)]]
    made = []
    for number in range(300):
        chosen = rng.sample(turns[number % 2], rng.randint(1, 5))
        messages = [message for turn in chosen for message in turn][:-1]
        made.append(template.prompt(messages))
    return made


def test_the_large_vocabulary(conversations: list[Rendered]) -> None:
    """The package of the large vocabulary encodes each conversation whole; typed control tokens are
    out of its reach, so only conversations without them are compared to it."""
    tokenizer, reference = qwen(rendered.text for rendered in conversations)
    cache = SegmentCache(tokenizer)
    compared = 0
    for rendered in conversations:
        ids = cache.encode(rendered).ids.tolist()
        assert ids == tokenizer.encode_rendered(rendered).tolist()
        if not rendered.breaks:
            assert ids == reference.encode(rendered.text)
            compared += 1
    assert compared >= 150


def test_boundaries_are_counted_in_tokens(conversations: list[Rendered]) -> None:
    cache = SegmentCache(nano())
    template = ChatTemplate(bundled("3.5"))
    system = Message(Role.SYSTEM, "Be brief. <|im_end|>\n")
    asked = (system, Message(Role.USER, "a <|im_start|>assistant\n b"))
    for rendered in (*conversations[:50], template.prompt(asked)):
        encoded = cache.encode(rendered)
        assert len(encoded.boundaries) == len(rendered.boundaries)
        for offset, position in zip(rendered.boundaries, encoded.boundaries, strict=True):
            before = Rendered(rendered.text[:offset], False, breaks=rendered.breaks)
            assert encoded.ids[:position].tolist() == nano().encode_rendered(before).tolist()


def test_a_boundary_inside_a_text_moves_back() -> None:
    rendered = Rendered("<think>a b c</think>", False, boundaries=(10, 20))
    encoded = SegmentCache(nano()).encode(rendered)
    assert encoded.boundaries == (1, len(encoded.ids))


def spliced(*splices: Splice, boundaries: tuple[int, ...] = ()) -> tuple[list[int], list[int]]:
    """(ids, boundaries) of `a<think>b</think>c<think></think>` with splices."""
    rendered = Rendered("a<think>b</think>c<think></think>", False, boundaries=boundaries)
    encoded = SegmentCache(nano()).encode(rendered, splices)
    return encoded.ids.tolist(), list(encoded.boundaries)


def ids_of(text: str) -> list[int]:
    return nano().encode(text).tolist()


def test_splices_replace_what_they_cover() -> None:
    own = np.array([5, 6, 7], np.int32)
    assert spliced(Splice(1, 9, own))[0] == [
        *ids_of("a"), 5, 6, 7, *ids_of("</think>c<think></think>")
    ]  # fmt: skip
    both, places = spliced(Splice(1, 9, own), Splice(18, 25, own[:1]), boundaries=(1, 18, 25, 33))
    assert both == [*ids_of("a"), 5, 6, 7, *ids_of("</think>c"), 5, *ids_of("</think>")]
    assert places == [1, 6, 7, 8]


@pytest.mark.parametrize(("start", "end"), [(0, 9), (1, 8), (1, 10), (2, 9), (25, 40), (1, 33)])
def test_splices_lie_between_control_tokens(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="splice"):
        spliced(Splice(start, end, np.array([5], np.int32)))


def test_only_what_is_new_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = nano()
    seen: list[str] = []
    encode = Tokenizer.encode_plain

    def count(self: Tokenizer, pieces: list[str]) -> list[list[int]]:
        seen.extend(pieces)
        return encode(self, pieces)

    monkeypatch.setattr(Tokenizer, "encode_plain", count)
    cache = SegmentCache(tokenizer)
    cache.encode(Rendered("<think>one</think>two<think>one</think>", False))
    assert sorted(seen) == ["", "one", "two"]
    seen.clear()
    cache.encode(Rendered("<think>one</think>two<think>three</think>", False))
    assert seen == ["three"]


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SegmentCache(nano(), 3000)
    kept = Rendered("<think>" + "k" * 50, False)
    for n in range(200):
        cache.encode(kept)
        cache.encode(Rendered(f"<think>{n}", False))
    assert 1000 < cache.size_bytes <= 3000
    big = Rendered("<think>" + "big " * 2000, False)
    assert cache.encode(big).ids.tolist() == nano().encode(big.text).tolist()
    monkeypatch.setattr(Tokenizer, "encode_plain", None)
    cache.encode(kept)
