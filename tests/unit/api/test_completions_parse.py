"""Completions bodies -> what to complete."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kslserve.api import completions
from kslserve.core.sampling import SamplingParams
from kslserve.errors import InvalidRequest, UnsupportedParameter

DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, top_k=20)


def parse(**fields: Any) -> completions.CompletionsRequest:
    return completions.parse(orjson.dumps({"model": "m", "prompt": "hi", **fields}), DEFAULTS)


def prompts(value: Any) -> list[Any]:
    return list(parse(prompt=value).options.prompts)


def test_defaults() -> None:
    found = parse()
    assert found.options.prompts == ("hi",)
    assert found.options.max_tokens == 16
    assert found.options.sampling == DEFAULTS
    assert not found.options.echo
    assert not found.return_ids
    assert not found.request.stream
    assert found.request.model == "m"


def test_fields() -> None:
    found = parse(
        max_tokens=0, temperature=0, top_p=0.5, stop=["x"], stream=True, echo=True, logprobs=3,
        seed=4, presence_penalty=1, stream_options={"include_usage": True}, n=1, best_of=1,
        suffix="", return_token_ids=True, ignore_eos=True, priority=2, user="u", new_field=1,
    )  # fmt: skip
    options = found.options
    assert options.max_tokens == 0
    assert options.echo
    assert options.stop == ("x",)
    assert options.ignore_eos
    assert options.priority == 2
    assert options.sampling == SamplingParams(
        temperature=0.0, top_p=0.5, top_k=20, presence_penalty=1.0, seed=4, logprobs=3
    )
    assert found.return_ids
    assert (found.request.stream, found.request.include_usage) == (True, True)


def test_prompts() -> None:
    assert prompts("a") == ["a"]
    assert prompts("") == [""]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1, 2], [3]]) == [[1, 2], [3]]
    assert prompts(["a", [3]]) == ["a", [3]]
    assert prompts([[]]) == [[]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"prompt": [1, 1 << 31]}, "prompt[1]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": []}, "stream_options"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
def test_refusals_name_their_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("fields", [{"n": 2}, {"best_of": 3}, {"suffix": "x"}])
def test_what_cannot_be_done_is_said(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter):
        parse(**fields)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "logprobs", "echo", "max_tokens", "n", "suffix", "stop"]),
        VALUES,
        max_size=4,
    )
)
def test_any_body_parses_or_is_a_400(fields: dict[str, Any]) -> None:
    refusal = None
    try:
        assert parse(**fields).options.prompts
    except InvalidRequest as error:
        refusal = error
    assert refusal is None or (refusal.status == 400 and str(refusal).endswith("."))
