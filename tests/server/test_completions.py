"""The Completions dialect: the official client library against a real server with the bundled
model; log-probabilities against the engine's own logits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import Completion

from kslserve.config import Settings
from kslserve.engine.types import RowKind
from kslserve.ksl.open import open_model
from tests.native.driver import Driver
from tests.server.serving import Server, serving

GOLDEN = Path(__file__).resolve().parents[1] / "data/golden/g1-tied"
LIMIT_S = 30
PROMPT = "The capital of France is Paris. Zürich ist 美しい."
SETTINGS = Settings(context=1024, max_seqs=4, wave_columns=16, kv="f32", activations="float")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def ids(server: Server) -> list[int]:
    """The prompt's ids: more than one wave of them."""
    service = server.app.state.service
    assert service is not None
    found = [int(i) for i in service.tokenizer.encode(PROMPT)]
    assert len(found) > SETTINGS.wave_columns
    return found


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Completion:
    return client.completions.create(
        model="m", prompt=prompt, **{"temperature": 0, "max_tokens": 4, **options}
    )


def truth(ids: list[int]) -> Any:
    """[positions, vocab] log-probabilities of what follows each id, in float64, from logits that
    the engine computes one position at a time."""
    with (
        open_model(SETTINGS.model) as model,
        Driver(
            model.spec, model.tensors, slots=1, slabs=1, blocks=32, block_tokens=16,
            blocks_per_slot=32, wave_columns=16, kv=SETTINGS.kv, threads=1,
        ) as driver,
    ):  # fmt: skip
        stream = driver.begin(0)
        rows = [
            stream.run(stream.row(RowKind.LAST, [token]), taps=("logits",)).taps["logits"][-1]
            for token in ids
        ]
        logits = np.array(rows, np.float64)[:, : model.spec.token_limit]
    peak = logits.max(1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(1, keepdims=True))


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_as_evaluation_harnesses_read_them(
    client: openai.OpenAI, ids: list[int], max_tokens: int
) -> None:
    expected = truth(ids)
    answer = complete(client, [ids], max_tokens=max_tokens, echo=True, logprobs=3)
    (choice,) = answer.choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert len(found.tokens) == len(ids) + max_tokens
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    for at in range(1, len(ids)):
        values = expected[at - 1]
        assert found.token_logprobs[at] == pytest.approx(values[ids[at]], abs=2e-5)
        top = found.top_logprobs[at]
        assert 3 <= len(top) <= 4
        assert max(top.values()) == pytest.approx(values.max(), abs=2e-5)
        assert top[found.tokens[at]] == found.token_logprobs[at]
        best = sorted(values)[-3:]
        assert sorted(top.values())[-3:] == pytest.approx(best, abs=2e-5)
        greedy = found.token_logprobs[at] == max(top.values())
        assert greedy == (int(values.argmax()) == ids[at])
    if max_tokens:
        values = expected[-1]
        assert found.token_logprobs[-1] == pytest.approx(values.max(), abs=2e-5)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens
    assert answer.usage.prompt_tokens == len(ids)
    assert choice.finish_reason == "length"
    assert choice.text.startswith(PROMPT)
    assert (choice.text == PROMPT) is (max_tokens == 0)


def test_the_activation_setting_reaches_the_engine(server: Server, ids: list[int]) -> None:
    """`--activations float` is the reference that `test_scores...` compares; the default rounds,
    little, and says so."""
    expected = truth(ids)
    true = [expected[at - 1][ids[at]] for at in range(1, len(ids))]

    def scores(of: Server) -> list[float]:
        with openai.OpenAI(base_url=of.url, api_key="none", max_retries=0) as client:
            (choice,) = complete(client, [ids], max_tokens=0, echo=True, logprobs=0).choices
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        return [value for value in choice.logprobs.token_logprobs[1:] if value is not None]

    assert scores(server) == pytest.approx(true, abs=2e-5)
    with serving(replace(SETTINGS, activations="auto")) as rounding:
        worst = max(abs(a - b) for a, b in zip(scores(rounding), true, strict=True))
        found = [s.app.engine.info.activation for s in (server, rounding) if s.app.engine]
    assert 1e-3 < worst < 1.0
    assert found == ["float", "int8"]


def test_offsets_are_places_in_the_text(client: openai.OpenAI) -> None:
    choice = complete(client, PROMPT, echo=True, logprobs=0).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.text_offset == sorted(found.text_offset)
    whole = [(o, t) for o, t in zip(found.text_offset, found.tokens, strict=True) if ":" not in t]
    assert whole
    for offset, token in whole:
        assert choice.text.startswith(token, offset) or token.startswith("<|")


def test_scores_do_not_depend_on_neighbours_or_on_the_cache(
    client: openai.OpenAI, ids: list[int]
) -> None:
    alone = complete(client, [ids], max_tokens=1, echo=True, logprobs=1).choices[0].logprobs
    lists = [ids[:5], ids, ids[:1], ids, [*ids, *ids]]
    answer = complete(client, lists, max_tokens=1, echo=True, logprobs=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4]
    assert answer.choices[1].logprobs == answer.choices[3].logprobs == alone
    first = answer.choices[2].logprobs
    assert first is not None
    assert first.token_logprobs is not None
    assert len(first.token_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, lists))


def test_text_goes_on(client: openai.OpenAI, ids: list[int]) -> None:
    by_text = complete(client, PROMPT).choices[0]
    by_ids = complete(client, ids, extra_body={"return_token_ids": True}).choices[0]
    assert by_text.text == by_ids.text
    assert by_ids.model_extra is not None
    assert len(by_ids.model_extra["token_ids"]) == 4
    assert by_ids.model_extra["prompt_token_ids"] == []
    echoed = complete(client, PROMPT, echo=True).choices[0]
    assert echoed.text == PROMPT + by_text.text
    assert echoed.logprobs is None
    assert complete(client, PROMPT, max_tokens=0).choices[0].text == ""
    with_default = client.completions.create(
        model="m", prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True}
    )
    assert with_default.usage is not None
    assert with_default.usage.completion_tokens == 16


def test_stop_strings(client: openai.OpenAI) -> None:
    text = complete(client, PROMPT, max_tokens=12).choices[0].text
    stop = text[len(text) // 2 :][:2]
    choice = complete(client, PROMPT, max_tokens=12, stop=stop).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_a_stream_says_the_same(client: openai.OpenAI, ids: list[int]) -> None:
    options: Any = {"echo": True, "logprobs": 2, "max_tokens": 6}
    prompts = [ids, ids[:7]]
    whole = complete(client, prompts, **options)
    texts = ["", ""]
    scores: list[list[Any]] = [[], []]
    ends: list[Any] = [None, None]
    usage = None
    with client.completions.create(
        model="m", prompt=prompts, temperature=0, stream=True,
        stream_options={"include_usage": True}, **options,
    ) as chunks:  # fmt: skip
        for chunk in chunks:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends[choice.index] = choice.finish_reason or ends[choice.index]
                if choice.logprobs is not None:
                    scores[choice.index] += choice.logprobs.token_logprobs or []
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert scores == [
        choice.logprobs and choice.logprobs.token_logprobs for choice in whole.choices
    ]
    assert usage == whole.usage


def test_many_prompts(client: openai.OpenAI, server: Server) -> None:
    prompts = [[5 + i, 6, 7] for i in range(20)]
    answer = complete(client, prompts, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(20))
    alone = complete(client, [prompts[13]], max_tokens=2)
    assert alone.choices[0].text == answer.choices[13].text
    service = server.app.state.service
    assert service is not None
    assert server.call(lambda: service.live) == 0


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([[1], []], "prompt[1]"),
        ("", "prompt[0]"),
        ([[1 << 20]], "prompt[0]"),
        ([[1], [1] * 5000], "prompt"),
    ],
)
def test_bad_prompts(client: openai.OpenAI, prompt: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, prompt)
    assert caught.value.param == param


def test_a_client_that_leaves(client: openai.OpenAI, server: Server) -> None:
    with client.completions.create(
        model="m", prompt=[[5, 6]] * 20, stream=True, max_tokens=500,
        extra_body={"ignore_eos": True},
    ) as chunks:  # fmt: skip
        next(iter(chunks))
    service = server.app.state.service
    assert service is not None
    end = time.monotonic() + LIMIT_S
    while server.call(lambda: service.live):
        assert time.monotonic() < end, "it goes on"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def bare() -> Iterator[Server]:
    """A model folder without a tokenizer."""
    with serving(
        Settings(
            model=str(GOLDEN),
            weights="bf16",
            head="bf16",
            context=512,
            wave_columns=32,
            kv="f32",
            activations="float",  # scores are compared with those of float32
        )
    ) as running:
        yield running


def test_a_model_without_a_tokenizer(bare: Server) -> None:
    assert "only /v1/completions works, with token ids" in bare.out.getvalue()
    golden = np.load(GOLDEN / "golden.npz")
    ids = golden["input_ids"].tolist()
    logits = golden["logits"].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    with openai.OpenAI(base_url=bare.url, api_key="none", max_retries=0, timeout=60) as client:
        choice = complete(
            client, ids, max_tokens=8, echo=True, logprobs=1,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        ).choices[0]  # fmt: skip
        assert choice.text == ""
        assert choice.model_extra is not None
        assert choice.model_extra["prompt_token_ids"] == ids
        assert choice.model_extra["token_ids"] == golden["greedy_ids"][:8].tolist()
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.tokens[:2] == [f"token_id:{token}" for token in ids[:2]]
        assert found.token_logprobs is not None
        scores = found.token_logprobs[1 : len(ids)]
        assert scores == pytest.approx(expected[np.arange(len(ids) - 1), ids[1:]], abs=2e-3)
        for text in ("words", ["more", [1, 2]]):
            with pytest.raises(openai.BadRequestError, match="no tokenizer"):
                complete(client, text)
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def test_the_body_is_plain_json(client: openai.OpenAI, ids: list[int]) -> None:
    raw = client.completions.with_raw_response.create(
        model="m", prompt=[ids[:3]], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    body = json.loads(raw.text)
    assert body["object"] == "text_completion"
    assert body["x_kslserve"]["seed"] is not None
