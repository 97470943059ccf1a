"""The reference sampler through the C ABI: published cases, and each rule restated in numpy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runners.files import named
from tests.runners.sampling_cases import (
    BadLogits,
    Invalid,
    drawn,
    run_logprob_bytes,
    run_sampling,
    run_sampling_batch,
    sample,
)

F32 = npt.NDArray[np.float32]


@pytest.mark.parametrize("case", named("sampling"), ids=lambda case: case["id"])
def test_case(case: dict[str, Any]) -> None:
    """Every published case holds in its strict form, those of level `should` too."""
    assert case["kind"] == "sampling"
    run_sampling(case)


def test_a_batch_is_sampled_in_every_order() -> None:
    first, second = named("sampling")[:2]
    run_sampling_batch({"rows": [first, second]})
    wrong = {**first, "expect": {"token": -1}}
    with pytest.raises(AssertionError):
        run_sampling_batch({"rows": [second, wrong]})


def test_bytes_of_tokens_are_reported() -> None:
    case = {"pieces_hex": ["e282", "ac", "41"], "expect": {"bytes": [[226, 130], [172], [65]]}}
    run_logprob_bytes(case)
    with pytest.raises(AssertionError):
        run_logprob_bytes({**case, "expect": {"bytes": [[226, 130], [172], [66]]}})


def mix(x: int) -> int:
    mask = 2**64 - 1
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    return x ^ x >> 31


def noise(seed: int, position: int, token: int) -> float:
    mask = 2**64 - 1
    key = mix((mix(seed) + position) & mask)
    word = mix((key + (token + 1) * 0x9E3779B97F4A7C15) & mask)
    return float(-np.log(-np.log(((word >> 12) + 0.5) * 2.0**-52)))


def kept(logits: F32, temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids that the filters leave, in float64."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    p = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    p /= p.sum()
    if top_p < 1:
        count = int(np.searchsorted(np.cumsum(p), top_p)) + 1
        order, p = order[:count], p[:count]
    return [i for i, probability in zip(order, p, strict=True) if probability >= min_p * p[0]]


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31 - 1),
    vocab=st.integers(1, 200),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 5, 300]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.613, 0.951]),
    min_p=st.sampled_from([0.0, 0.0, 0.0713, 1.0]),
)
def test_the_draw_is_the_noisy_argmax_of_what_the_filters_leave(
    seed: int, position: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, vocab).astype(np.float32)
    found, adjusted = sample(
        logits, seed=seed, position=position, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p,
    )  # fmt: skip
    assert adjusted.tobytes() == logits.tobytes()
    left = kept(logits, temperature, top_k, top_p, min_p)
    scores = {i: logits[i] / temperature + noise(seed, position, i) for i in left}
    # The arithmetic differs (float64 here), so a photo finish may go either way.
    assert found in scores
    assert scores[found] >= max(scores.values()) - 1e-4


def penalised(
    logits: F32, prompt: list[int], output: list[int], repetition: float, presence: float,
    frequency: float,
) -> F32:  # fmt: skip
    values = logits.copy()
    for i in set(prompt) | set(output):
        values[i] = values[i] / repetition if values[i] > 0 else values[i] * repetition
        count = output.count(i)
        values[i] -= (presence + frequency * count) if count else 0
    return values


ids = st.lists(st.integers(0, 69), max_size=40)
penalty = st.sampled_from([0.0, 0.0, 0.5, -0.25, 2.0])


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompt=ids,
    output=ids,
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    presence=penalty,
    frequency=penalty,
    bias=st.dictionaries(st.integers(0, 69), st.sampled_from([-100.0, -1.0, 3.0]), max_size=9),
)
def test_penalties_and_bias(
    seed: int, prompt: list[int], output: list[int], repetition: float, presence: float,
    frequency: float, bias: dict[int, float],
) -> None:  # fmt: skip
    logits = np.random.default_rng(seed).normal(0, 3, 70).astype(np.float32)
    found, adjusted = sample(
        logits, temperature=0, prompt_ids=prompt, output_ids=output, bias=bias,
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
    )  # fmt: skip
    expected = penalised(logits, prompt, output, repetition, presence, frequency)
    for i, value in bias.items():
        expected[i] += value
    assert np.allclose(adjusted, expected, atol=1e-5)
    assert found == int(np.argmax(adjusted))


def test_greedy_ignores_filters_and_seed() -> None:
    logits = np.random.default_rng(1).normal(0, 1, 500).astype(np.float32)
    for top_k, top_p, min_p in itertools.product([0, 3], [0.1, 1.0], [0.0, 1.0]):
        seen = drawn(logits, 5, temperature=0, top_k=top_k, top_p=top_p, min_p=min_p)
        assert seen == {int(np.argmax(logits))}


def test_a_mask_and_padding_ids_are_never_sampled() -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[[7, 40, 99]] = 9
    allowed = {3, 31, 32, 64, 98}
    mask = np.zeros(4, dtype=np.uint32)
    for i in allowed:
        mask[i // 32] |= np.uint32(1 << i % 32)
    assert drawn(logits, 300, mask=mask) == allowed
    assert drawn(logits, 300, mask=mask, token_limit=65) == allowed - {98}
    assert drawn(logits, 20, temperature=0, token_limit=30) == {7}
    with pytest.raises(BadLogits):
        sample(logits, mask=mask, token_limit=3)
    adjusted = sample(logits, mask=mask, token_limit=65)[1]
    assert np.array_equal(adjusted, logits)  # before the mask


def test_ties_at_the_edge_of_top_k_keep_the_lower_ids() -> None:
    logits = np.ones(3000, dtype=np.float32)
    logits[2000] = 2
    assert drawn(logits, 60, top_k=3, temperature=2.0) == {0, 1, 2000}
    wide = drawn(logits, 400, top_k=1500, temperature=100.0)
    assert max(wide - {2000}) < 1499
    assert len(wide) > 200


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1.0, 1e6])
def test_extreme_temperatures(temperature: float) -> None:
    logits = np.array([-np.inf, 5, 4.99, -80, 3e38, -3e38], dtype=np.float32)
    seen = drawn(logits, 200, temperature=temperature)
    assert seen == {4}
    flat = drawn([0.0, 1.0, 2.0], 200, temperature=temperature)
    assert flat == ({2} if temperature < 0.1 else {0, 1, 2})


def test_a_large_vocabulary_takes_every_filter_path() -> None:
    vocab = 248_320
    logits = np.random.default_rng(3).normal(0, 2, vocab).astype(np.float32)
    best = int(np.argmax(logits))
    assert sample(logits, top_k=1)[0] == best
    assert sample(logits, top_p=1e-6)[0] == best
    assert sample(logits, min_p=1.0)[0] == best
    for params in ({"top_k": 20}, {"top_k": 5000}, {"top_p": 0.5}, {"min_p": 0.02}):
        left = kept(logits, 1.0, int(params.get("top_k", 0)), params.get("top_p", 1.0),
                    params.get("min_p", 0.0))  # fmt: skip
        assert drawn(logits, 5, **params) <= set(left)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 37, 99])
def test_one_bad_logit_spoils_the_row(bad: float, at: int) -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[at] = bad
    for temperature in (0, 1):
        with pytest.raises(BadLogits):
            sample(logits, temperature=temperature, token_limit=50)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"repetition_penalty": 0.0}, "repetition is 0"),
        ({"presence_penalty": float("inf")}, "presence is inf"),
        ({"top_k": -2}, "top_k is -2"),
        ({"prompt_ids": [4]}, "prompt_ids\\[0\\] is 4, must be 0 to 3"),
        ({"output_ids": [0, -1]}, "output_ids\\[1\\] is -1"),
        ({"bias": {9: 1.0}}, "bias_ids\\[0\\] is 9"),
        ({"bias": {1: float("nan")}}, "bias\\[0\\] is nan"),
        ({"token_limit": 5}, "token_limit is 5"),
    ],
)
def test_bad_parameters_are_refused_by_name(params: dict[str, Any], text: str) -> None:
    with pytest.raises(Invalid, match=text):
        sample([0.0, 1.0, 2.0, 3.0], **params)


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(
        st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=40
    ),
    temperature=st.floats(0, 100, width=32),
    top_k=st.integers(0, 50),
    top_p=st.floats(2.0**-20, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    repetition=st.floats(2.0**-20, 100, width=32),
    frequency=st.floats(-1e30, 1e30),
    output=st.lists(st.integers(0, 39), max_size=5),
)
def test_any_input_gives_an_id_or_a_refusal(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float,
    repetition: float, frequency: float, output: list[int],
) -> None:  # fmt: skip
    output = [i for i in output if i < len(logits)]
    try:
        found, _ = sample(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition, frequency_penalty=frequency, output_ids=output,
        )  # fmt: skip
    except BadLogits:
        return
    assert 0 <= found < len(logits)
    assert logits[found] > -np.inf
