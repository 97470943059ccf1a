"""BareTokenizer: in place of the tokenizer of a model that came without one. Ids go in and come
out; there is no text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from kslserve.errors import InvalidRequest
from kslserve.text.tokenizer import Tokenizer


class BareTokenizer(Tokenizer):
    """size: number of ids. Whatever needs a text's ids raises InvalidRequest."""

    def __init__(self, size: int, eos_ids: Iterable[int] = ()) -> None:
        self.bytes_of = [b""] * size
        self.special_ids = frozenset()
        self.texts = {}
        self.control_tokens = ()
        self.end_of_turn_ids = tuple(eos_ids)

    def id_of(self, text: str) -> int | None:
        return None

    def require_control_ids(self) -> None:
        """Nothing is required of what serves no chat."""

    def controls(self, text: str, breaks: Sequence[int] = ()) -> NoReturn:
        raise InvalidRequest(
            "This model has no tokenizer: it takes token ids at /v1/completions, and nothing else."
        )

    def encode_plain(self, pieces: Sequence[str]) -> NoReturn:
        self.controls("")
