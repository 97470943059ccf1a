"""Tokenizer: text -> ids, and what each id is.

The library's tokenizer is loaded **without** its added tokens; control tokens are found here and
put in by id. So there is one place that decides which occurrence of `<|im_end|>` in a prompt is a
control token and which is text that somebody typed, and for text without typed ones the ids are
those of the original. Ids of control tokens differ between vocabularies and are always looked up by
text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import orjson
import tokenizers

from kslserve.errors import ModelFileError
from kslserve.text.rendered import Rendered
from kslserve.text.vocabulary import read_vocabulary

Ids = npt.NDArray[np.int32]

REQUIRED_CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
END_OF_TURN = ("<|im_end|>", "<|endoftext|>")


class Tokenizer:
    """Immutable after construction, usable from several threads. texts: what detokenizers have
    found out so far, the text of ids that are whole characters by themselves.

    tokenizer_json: content of a `tokenizer.json`. eos_ids: end tokens of the model's generation
    config; empty means the usual ones, by text. Raises ModelFileError if the file is damaged or of
    a kind that we do not know.
    """

    def __init__(self, tokenizer_json: bytes, eos_ids: Iterable[int] = ()):
        try:
            document = orjson.loads(tokenizer_json)
        except orjson.JSONDecodeError as error:
            raise ModelFileError(f"The tokenizer is not JSON: {error}.") from error
        if not isinstance(document, dict):
            raise ModelFileError("The tokenizer is not a JSON object.")
        vocabulary = read_vocabulary(document)
        self.bytes_of: list[bytes] = vocabulary.bytes_of
        self.special_ids: frozenset[int] = vocabulary.special
        self.texts: dict[int, str] = {}
        self.control_tokens: tuple[str, ...] = tuple(vocabulary.control)
        self._control = vocabulary.control
        self._ids = vocabulary.ids
        # At one place the longest token wins, as in the library's own matcher.
        by_length = sorted(self._control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, by_length))) if by_length else None
        document.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        try:
            self._bpe = tokenizers.Tokenizer.from_str(orjson.dumps(document).decode())
        except Exception as error:  # the library raises bare Exception
            raise ModelFileError(f"The tokenizer cannot be loaded: {error}.") from error
        self.end_of_turn_ids: tuple[int, ...] = tuple(eos_ids) or tuple(
            self._control[text] for text in END_OF_TURN if text in self._control
        )

    @property
    def size(self) -> int:
        """Number of ids; logits at or above it are padding and must be masked."""
        return len(self.bytes_of)

    def id_of(self, text: str) -> int | None:
        """Id of the token that is exactly `text`: a control token, or one in the vocabulary's
        alphabet."""
        found = self._control.get(text)
        return self._ids.get(text) if found is None else found

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one id; b"" for an id that the vocabulary does not have."""
        return self.bytes_of[token_id] if 0 <= token_id < len(self.bytes_of) else b""

    def special(self, token_id: int) -> bool:
        """True if the id is left out of output text."""
        return token_id in self.special_ids

    def require_control_ids(self) -> None:
        """Raise ModelFileError naming the control tokens that serving needs and the vocabulary
        lacks."""
        missing = [text for text in REQUIRED_CONTROL if text not in self._control]
        if missing:
            raise ModelFileError(f"The tokenizer lacks {', '.join(missing)}.")

    def encode(self, text: str) -> Ids:
        """int32 ids of `text`, in which control tokens count wherever they stand. Nothing is
        added."""
        return self._encode(text, ())

    def encode_rendered(self, rendered: Rendered) -> Ids:
        """int32 ids of a prompt, in which only the control tokens that the template wrote count."""
        return self._encode(rendered.text, rendered.breaks)

    def _encode(self, text: str, breaks: Sequence[int]) -> Ids:
        if not text:
            return np.empty(0, np.int32)
        controls = self.controls(text, breaks)
        starts = [0, *(end for _, end, _ in controls)]
        ends = [*(start for start, _, _ in controls), len(text)]
        pieces = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        ids: list[int] = []
        for place, piece in enumerate(self.encode_plain(pieces)):
            ids += piece
            if place < len(controls):
                ids.append(controls[place][2])
        return np.array(ids, np.int32)

    def encode_plain(self, pieces: Sequence[str]) -> list[list[int]]:
        """Ids of each text on its own, in which nothing counts as a control token."""
        # The batch call releases the GIL; the single one holds it for the whole text.
        try:
            encoded = self._bpe.encode_batch_fast(pieces, add_special_tokens=False)
        except TypeError:  # lone surrogates
            encoded = self._bpe.encode_batch_fast(
                [_well_formed(piece) for piece in pieces], add_special_tokens=False
            )
        return [piece.ids for piece in encoded]

    def controls(self, text: str, breaks: Sequence[int] = ()) -> list[tuple[int, int, int]]:
        """(start, end, id) of each control token in `text`, ascending. What has a break inside it
        is text. The ids of the text are these ids and `encode_plain` of what lies between them."""
        found: list[tuple[int, int, int]] = []
        at = 0
        if self._pattern is None:
            return found
        while (match := self._pattern.search(text, at)) is not None:
            first, end = match.span()
            place = bisect_right(breaks, first)
            if place < len(breaks) and breaks[place] < end:
                at = first + 1
                continue
            found.append((first, end, self._control[match[0]]))
            at = end
        return found


def _well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
