"""Sampler defaults and the tokenizer facts that a model file gives: vocabulary size and end ids.

The tokenizer itself is built elsewhere; here its JSON is only asked which ids exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from kslserve.ksl.files import fail, quote
from kslserve.ksl.hf_config import eos_ids, is_finite

END_TEXTS = ("<|im_end|>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling of a request that names none. temperature 0 is greedy (do_sample false); top_p 1,
    top_k 0, min_p 0, presence_penalty 0 and repetition_penalty 1 are off. eos_ids: every id that
    ends a turn."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 20
    min_p: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    do_sample: bool = True
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """size: largest id + 1. end_ids: ids of END_TEXTS that the tokenizer has."""

    size: int
    end_ids: tuple[int, ...]


def read_tokenizer(data: bytes, where: str) -> TokenizerFacts:
    """Facts of a tokenizer.json. ModelFileError when it is not one."""
    try:
        root = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        fail(where, f"expected JSON: {error}.")
    model = root.get("model") if isinstance(root, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict) or not all(type(i) is int for i in vocab.values()):
        fail(where, "expected a tokenizer.json with model.vocab as a map of texts to ids.")
    largest = max(vocab.values(), default=-1)
    by_text = {text: vocab[text] for text in END_TEXTS if text in vocab}
    added = root.get("added_tokens") or []
    if not isinstance(added, list):
        fail(where, f"expected added_tokens to be a list, found {quote(added)}.")
    for token in added:
        index = token.get("id") if isinstance(token, dict) else None
        if type(index) is not int or not isinstance(token.get("content"), str):
            fail(where, f"expected an added token with id and content, found {quote(token)}.")
        largest = max(largest, index)
        if token["content"] in END_TEXTS:
            by_text[token["content"]] = index
    if largest < 0 or min(vocab.values(), default=0) < 0:
        fail(where, "expected ids from 0 up, found none.")
    return TokenizerFacts(largest + 1, tuple(by_text[t] for t in END_TEXTS if t in by_text))


def read_generation(
    values: dict[str, Any] | None,
    config_eos: tuple[int, ...],
    tokenizer: TokenizerFacts | None,
    vocab: int,
    where: str,
) -> GenerationDefaults:
    """Defaults from a parsed generation_config.json, or the family's own when there is none. A key
    that is absent from the file is off. Raises ModelFileError for an impossible value."""
    ends = eos_ids((values or {}).get("eos_token_id"), vocab, where) or config_eos
    if tokenizer is not None:
        ends = tuple(dict.fromkeys((*ends, *tokenizer.end_ids)))
    if values is None:
        return GenerationDefaults(eos_ids=ends)
    do_sample = values.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        fail(where, f"expected do_sample to be true or false, found {quote(do_sample)}.")
    sample = do_sample is not False

    def number(key: str, default: float, low: float, high: float) -> float:
        value = values.get(key)
        if value is None:
            return default
        if not is_finite(value) or not low <= value <= high:
            fail(where, f"expected {key} from {low:g} to {high:g}, found {quote(value)}.")
        return float(value)

    temperature = number("temperature", 1.0, 0.0, 100.0)
    top_k = number("top_k", 0, -1, 1 << 30)
    top_p = number("top_p", 1.0, 0.0, 1.0)
    repetition = number("repetition_penalty", 1.0, 0.0, 100.0)
    if top_k != int(top_k) or top_p == 0 or repetition == 0:
        fail(where, "expected a whole top_k, and top_p and repetition_penalty above 0.")
    return GenerationDefaults(
        temperature=temperature if sample else 0.0,
        top_p=top_p,
        top_k=max(int(top_k), 0),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=repetition,
        do_sample=sample and temperature > 0,
        eos_ids=ends,
    )
