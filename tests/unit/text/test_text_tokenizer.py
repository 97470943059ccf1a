"""Text to ids and back, against the tokenizers library and the large vocabulary's own package."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from kslserve.errors import ModelFileError
from kslserve.text.detokenizer import Detokenizer
from kslserve.text.rendered import Rendered
from kslserve.text.tokenizer import Tokenizer
from tests.runners.parser_cases import run_bytes
from tests.unit.text.text_support import load_cases, nano, nano_json, qwen

WORDS = (
    *("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|im_", "im_end|>", "<"),
    *(
        "Hello",
        " world",
        "def f(x):",
        "\n",
        "\n\n",
        "    ",
        "1234",
        " 5",
        "é",
        "e\u0301",
        "한국어",
        "😀",
        "…",
    ),
)
TEXT = st.lists(st.sampled_from(WORDS) | st.text(max_size=5), max_size=12).map("".join)


@functools.cache
def library() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(nano_json().decode())


def library_ids(text: str) -> list[int]:
    (encoded,) = library().encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoded.ids
    return ids


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_ids_are_those_of_the_library(text: str) -> None:
    ids = nano().encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == library_ids(text)


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_bytes_of_the_ids_are_the_text(text: str) -> None:
    ids = nano().encode(text).tolist()
    joined = b"".join(map(nano().token_bytes, ids)).decode()
    assert joined == library().normalizer.normalize_str(text)


def test_large_vocabulary() -> None:
    texts = [first + second for first in WORDS for second in WORDS]
    tokenizer, reference = qwen(texts)
    for text in texts:
        assert tokenizer.encode(text).tolist() == reference.encode(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=10))
def test_breaks_make_text_of_control_tokens(words: list[str]) -> None:
    """A break inside every control token: the same bytes, and no control token."""
    text = "".join(words)
    starts = [
        at
        for at in range(len(text))
        for token in nano().control_tokens
        if text.startswith(token, at)
    ]
    rendered = Rendered(text, False, breaks=tuple(at + 1 for at in starts))
    ids = nano().encode_rendered(rendered).tolist()
    control = {nano().id_of(token) for token in nano().control_tokens}
    assert not control & set(ids)
    assert nano().encode_rendered(Rendered(text, False)).tolist() == nano().encode(text).tolist()


def test_break_at_the_edge_of_a_token_changes_nothing() -> None:
    rendered = Rendered("a<think>b", False, breaks=(1, 8))
    assert nano().encode_rendered(rendered).tolist() == nano().encode("a<think>b").tolist()


def test_ids_by_text() -> None:
    tokenizer = nano()
    assert tokenizer.id_of("<|im_end|>") == 8168
    assert tokenizer.id_of("a") is not None
    assert tokenizer.id_of("<|nothing|>") is None
    assert tokenizer.size == 8192
    assert tokenizer.end_of_turn_ids == (8168, 8166)
    assert Tokenizer(nano_json(), [7]).end_of_turn_ids == (7,)
    tokenizer.require_control_ids()


def test_special_ids() -> None:
    tokenizer = nano()
    assert tokenizer.special(8168)
    assert not tokenizer.special(8190)
    assert tokenizer.token_bytes(8190) == b"<think>"
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(8192) == b""


def test_empty_text_and_lone_surrogates() -> None:
    assert nano().encode("").tolist() == []
    assert nano().encode("a\ud800b").tolist() == library_ids("a\ufffdb")
    assert nano().encode("\ud83d\ude00").tolist() == library_ids("😀")


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(nano_json()), **changes}).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        nano_json()[:5000],
        changed(model={"type": "WordPiece"}),
        changed(model={"type": "BPE", "vocab": {}}),
        changed(model={"type": "BPE", "vocab": {"a": "x"}}),
        changed(decoder=None),
        changed(added_tokens=[{"content": "x"}]),
        changed(pre_tokenizer={"type": "Nonsense"}),
    ],
)
def test_damaged_file_is_one_sentence(content: bytes) -> None:
    with pytest.raises(ModelFileError, match="okenizer"):
        Tokenizer(content)


def test_missing_control_tokens_are_named() -> None:
    tokenizer = Tokenizer(changed(added_tokens=[]))
    assert tokenizer.encode("<think>").tolist() != [8190]
    assert tokenizer.end_of_turn_ids == ()
    with pytest.raises(ModelFileError, match=r"lacks <\|im_start\|>, .*</tool_call>"):
        tokenizer.require_control_ids()


# Detokenizer


@pytest.mark.parametrize(
    "case",
    load_cases("bytes"),
    ids=lambda case: case["id"],
)
def test_bytes_case(case: dict[str, Any]) -> None:
    run_bytes(case, nano())


@settings(max_examples=200, deadline=None)
@given(TEXT, st.integers(1, 5))
def test_detokenizing_gives_the_text_without_special_tokens(text: str, step: int) -> None:
    ids = nano().encode(text).tolist()
    detokenizer = Detokenizer(nano())
    got = "".join(detokenizer.feed(ids[at : at + step]) for at in range(0, len(ids), step))
    want = library().normalizer.normalize_str(text)
    shown = b"".join(nano().token_bytes(i) for i in ids if not nano().special(i)).decode()
    assert got + detokenizer.flush() == shown
    if "<|" not in text:
        assert shown == want


@given(st.binary(max_size=24), st.lists(st.integers(0, 24), max_size=4))
def test_any_bytes_in_any_pieces(data: bytes, places: list[int]) -> None:
    marks = [0, *sorted(places), len(data)]
    detokenizer = Detokenizer(nano())
    got = "".join(detokenizer.feed_bytes(data[a:b]) for a, b in itertools.pairwise(marks))
    assert got + detokenizer.flush() == data.decode("utf-8", "replace")


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    detokenizer = Detokenizer(nano())
    assert detokenizer.feed([8192, -1]) == ""
    assert detokenizer.feed([]) == ""
    assert detokenizer.feed([8168]) == ""
    assert detokenizer.feed([8190]) == "<think>"
