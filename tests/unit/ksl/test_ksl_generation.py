from __future__ import annotations

import json
from typing import Any

import pytest

from kslserve.errors import ModelFileError
from kslserve.ksl.generation import GenerationDefaults, read_generation, read_tokenizer
from tests.unit.ksl.ksl_build import tokenizer


def read(values: dict[str, Any] | None, **more: Any) -> GenerationDefaults:
    given = {"config_eos": (), "tokenizer": None, "vocab": 100, "where": "g"} | more
    return read_generation(values, **given)


def test_the_published_file() -> None:
    values = {"do_sample": True, "eos_token_id": [46, 44], "temperature": 1.0, "top_k": 20,
              "top_p": 0.95, "bos_token_id": 44}  # fmt: skip
    assert read(values) == GenerationDefaults(eos_ids=(46, 44))


def test_no_file_gives_the_familys_settings() -> None:
    assert read(None) == GenerationDefaults(1.0, 0.95, 20, 0.0, 0.0, 1.0, True, ())


def test_absent_keys_are_off() -> None:
    assert read({}) == GenerationDefaults(1.0, 1.0, 0, 0.0, 0.0, 1.0, True, ())
    assert read({"top_k": -1}).top_k == 0


def test_do_sample_false_is_greedy() -> None:
    found = read({"do_sample": False, "temperature": 0.7})
    assert (found.temperature, found.do_sample) == (0.0, False)
    assert read({"temperature": 0}).do_sample is False


def test_end_ids_from_everywhere_once() -> None:
    facts = read_tokenizer(tokenizer(50), "t")
    assert (facts.size, facts.end_ids) == (50, (49, 48))
    assert read({"eos_token_id": 7}, config_eos=(8,)).eos_ids == (7,)
    assert read({}, config_eos=(8,)).eos_ids == (8,)
    assert read({"eos_token_id": [48]}, tokenizer=facts).eos_ids == (48, 49)
    assert read(None, config_eos=(8,), tokenizer=facts).eos_ids == (8, 49, 48)
    assert read_tokenizer(tokenizer(5, ends=False), "t").end_ids == ()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": 10**400},
        {"temperature": -(10**400)},
        {"top_k": True},
        {"min_p": 2},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"do_sample": 1},
        {"eos_token_id": 100},
        {"eos_token_id": {"a": 1}},
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"^g: expected .*\.$"):
        read(values)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"model": {"vocab": [1]}}',
        b'{"model": {"vocab": {"a": "0"}}}',
        b'{"model": {"vocab": {"a": -1}}}',
        b'{"model": {"vocab": {}}}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": {"b": 1}}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1}]}',
        b'{"model": {"vocab": {"a": 0}}, "added_tokens": [3]}',
        b"[" * 100_000,
        json.dumps({"model": {"vocab": {"a": 0}}})[:-1].encode(),
    ],
)
def test_what_is_no_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(ModelFileError, match=r"^t: expected "):
        read_tokenizer(data, "t")
