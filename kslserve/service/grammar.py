"""Grammars -> masks over the vocabulary, by the llguidance library.

The library is loaded, and its table of the vocabulary built, by `Grammars.build`, at the latest at
first use. For a large vocabulary that takes most of a second in which the library holds the
interpreter lock, so no other thread runs: servers do it before they are ready.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kslserve.errors import KslError
from kslserve.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64  # compiled grammars that are kept
# White space as JSON is written by habit. Without a bound a model that is lost goes on with it for
# ever.
_OPTIONS = {
    "whitespace_pattern": r"[ ]|\n[ ]{0,24}|\n\t{0,8}",
    "json_allow_general_unicode_escapes": True,
}
# Ids whose text lies inside a JSON string are looked up in one step and not one by one.
_SLICES = [r'[^"\\\x00-\x1F\x7F]+']
_PLACE_MAX = 200  # characters of a path in a message
_PLACES_MAX = 200  # parts of a schema that are tried to find the one at fault


class GrammarError(ValueError):
    """A grammar that the library cannot compile, in its own words."""


class SamplingFault(KslError):
    """A grammar became too large for its limits while it was followed."""


class Grammars:
    """Compiles grammars for one vocabulary. Usable from several threads.

    vocab: width of the masks in ids; those that the tokenizer does not have are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self.words = (vocab + 31) // 32
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._table: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    @property
    def built(self) -> bool:
        return self._table is not None

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at the start of a grammar, owned by the caller. Raises GrammarError."""
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            found = self._kept.get(grammar)
            if found is not None:
                self._kept.move_to_end(grammar)
                return found.deep_copy()
        # Outside of the lock: a large grammar must not hold up those that are kept.
        limits = LLParserLimits(verbose_errors=False)
        made = LLMatcher(self._ready(), grammar, log_level=0, limits=limits)
        if made.is_error():
            raise GrammarError(_first_lines(made.get_error()))
        with self._lock:
            self._kept[grammar] = made.deep_copy()
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return made

    def build(self) -> None:
        """Make the table now."""
        self._ready()

    def ids(self, text: str) -> list[int]:
        """Ids whose bytes are those of the text."""
        return self._tokenizer.encode_plain([text])[0]

    def _ready(self) -> LLTokenizer:
        with self._building:
            if self._table is None:
                from llguidance import LLTokenizer

                wrapper: Any = _Vocabulary(self._tokenizer, self._vocab)
                end = list(self._tokenizer.end_of_turn_ids)
                try:
                    table = LLTokenizer(wrapper, eos_token=end, slices=[])
                    self._table = table.with_slices(_SLICES)
                except BaseException as error:
                    # A panic of the library, which is no Exception: tokens that it does not take.
                    if type(error).__name__ != "PanicException":
                        raise
                    text = "structured output cannot be had with this tokenizer"
                    raise GrammarError(f"{text}: {_first_lines(str(error))}") from None
            return self._table


class _Vocabulary:
    """A tokenizer in the form that the library takes. Control tokens are no text to it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.end_of_turn_ids[0]
        self.tokens = [*tokenizer.bytes_of, *[b""] * (vocab - tokenizer.size)]
        control = (tokenizer.id_of(text) for text in tokenizer.control_tokens)
        self.special_token_ids = sorted(i for i in control if i is not None)

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode_plain([plain])[0]


def json_grammar(schema: Any, *, lenient: bool = False) -> str:
    """The grammar of JSON that a schema allows. lenient: what the library does not know of JSON
    Schema is left out instead of being an error."""
    from llguidance import LLMatcher

    text = _dump(schema if isinstance(schema, dict) else {"allOf": [schema]})
    options: Any = {**_OPTIONS, "lenient": lenient}
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    except ValueError as error:
        raise GrammarError(_first_lines(str(error))) from error


def lark_grammar(rules: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(rules)


def json_part(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """A JSON value inside of Lark rules. root: where the definitions are that it refers to."""
    whole = {**_definitions(root), **schema, "x-guidance": _OPTIONS}
    return f"%json {_dump(whole)}"


def _dump(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise GrammarError("it is nested too deeply") from error


def compile_schema(grammars: Grammars, schema: Any, *, lenient: bool) -> LLMatcher:
    """A matcher for JSON of a schema. Raises GrammarError that names the part at fault."""
    try:
        return grammars.matcher(json_grammar(schema, lenient=lenient))
    except GrammarError as error:
        place, text = _blame(grammars, schema, str(error), lenient=lenient)
        place = place if len(place) <= _PLACE_MAX else place[:_PLACE_MAX] + "..."
        raise GrammarError(f"{place}: {text}" if place else text) from error


def _blame(grammars: Grammars, schema: Any, text: str, *, lenient: bool) -> tuple[str, str]:
    """(path of the smallest part that cannot be compiled by itself, the library's words)."""
    place = ""
    root = schema if isinstance(schema, dict) else {}
    tries = 0
    part = schema
    while True:
        for path, child in _parts(part):
            tries += 1
            if tries > _PLACES_MAX:
                return place, text
            whole = {**_definitions(root), **child}
            try:
                grammars.matcher(json_grammar(whole, lenient=lenient))
            except GrammarError as error:
                place = f"{place}.{path}" if place else path
                part, text = child, str(error)
                break
        else:
            return place, text


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right inside of a schema, each with its path."""
    if not isinstance(schema, dict):
        return
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(key)
        if isinstance(inner, dict):
            for name, child in inner.items():
                if isinstance(child, dict):
                    yield f"{key}.{name}", child
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        inner = schema.get(key)
        if isinstance(inner, list):
            for index, child in enumerate(inner):
                if isinstance(child, dict):
                    yield f"{key}[{index}]", child


def _definitions(root: dict[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _first_lines(text: str) -> str:
    """The gist of the library's message, which may go on with a dump of its state."""
    text = text.split("\n<state>", 1)[0].strip().rstrip(".")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:300] or "it is too complex"
