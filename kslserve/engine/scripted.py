"""ScriptedEngine: a fake engine in real time whose output comes from a script.

Script file (JSON):

    {"outputs": [{"match": "text", "chunks": ["Hel", "lo"], "end": "stop", "thinking": false,
                  "first_ms": 0, "delay_ms": 5}, ...], "prompt_ms": 0}

An output with `match` answers prompts that contain that text; the others answer the remaining
requests in order and then from the start again. Every chunk is one token, whatever its text. After
the last chunk `end` "stop" samples the request's stop id; "length" samples empty tokens until the
output limit. `thinking`, where given, is the state that the chunks start in: if the prompt ends in
the other state (inside an opened `<think>` or not), the missing tag is put before the first chunk,
in the same token. first_ms: time before the first token; delay_ms: before each later one.
prompt_ms: time of a wave that computes a part of a prompt other than its last.

Once there is a mask, the text that is left is sampled in the tokenizer's own ids, control tokens
included; what the mask does not allow is left out, as if the model had thought better of it, and
where it does not allow the end, the text goes on with what closes it.

Chunks have ids of their own behind the tokenizer's vocabulary, so whoever turns ids into text must
use `ScriptedTokenizer(tokenizer, script)` in place of the tokenizer, and the engine gets the same:

    script = Script.load(path, tokenizer.size)
    tokenizer = ScriptedTokenizer(tokenizer, script)
    engine = ScriptedEngine(sizes, script, tokenizer)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kslserve.engine.fake import FakeEngine
from kslserve.engine.fakemodel import HashModel, Slot, Timeline
from kslserve.engine.model import PoolSizes
from kslserve.engine.types import RowKind, Wave
from kslserve.errors import UsageError

OPENED = "<think>\n"
CLOSE = "</think>\n\n"
END_KINDS = ("stop", "length")
KEYS = {"match", "chunks", "end", "thinking", "first_ms", "delay_ms"}
CLOSERS = (b"</think>", b'"', b"}", b"]")
TAIL_TOKENS = 16  # enough of a prompt's end to see whether thinking is open


class TokenTable(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Output:
    """One scripted answer. ids: of the chunks; opened, closed: id of the first chunk with a tag in
    front that opens or closes thinking."""

    match: str | None
    ids: tuple[int, ...]
    opened: int
    closed: int
    end: str
    thinking: bool | None
    first_s: float
    delay_s: float


class Script:
    """The outputs and the texts of the ids from `base` on. Raises UsageError for a bad script."""

    def __init__(self, data: Any, base: int) -> None:
        self.base = base
        self.texts: list[bytes] = []
        self._ids: dict[str, int] = {}
        self.filler = self._id("")
        outputs = data.get("outputs") if isinstance(data, dict) else None
        if not isinstance(outputs, list) or not outputs:
            raise UsageError('A script is an object with a list "outputs" that is not empty.')
        self.outputs = tuple(self._output(i, entry) for i, entry in enumerate(outputs))
        prompt_ms = data.get("prompt_ms", 0)
        if not isinstance(prompt_ms, (int, float)) or prompt_ms < 0:
            raise UsageError('"prompt_ms" of a script must be a number of milliseconds.')
        self.prompt_s = prompt_ms / 1000

    @classmethod
    def load(cls, path: str, base: int) -> Script:
        """Read a script file; `base` is the first id that its chunks may take."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"Cannot read the script {path}: {error.strerror}.") from error
        except ValueError as error:
            raise UsageError(f"The script {path} is not JSON: {error}.") from error
        return cls(data, base)

    @property
    def size(self) -> int:
        """Vocabulary size: the tokenizer's and that of the chunks."""
        return self.base + len(self.texts)

    def _id(self, text: str) -> int:
        if text not in self._ids:
            self._ids[text] = self.base + len(self.texts)
            self.texts.append(text.encode("utf-8", "surrogatepass"))
        return self._ids[text]

    def _output(self, index: int, entry: Any) -> Output:
        where = f"Output {index} of the script"
        if not isinstance(entry, dict) or not entry.keys() <= KEYS:
            raise UsageError(f"{where} must be an object with keys of {sorted(KEYS)}.")
        chunks = entry.get("chunks")
        if not isinstance(chunks, list) or not all(isinstance(c, str) for c in chunks):
            raise UsageError(f'{where} needs a list of texts "chunks".')
        end = entry.get("end", "stop")
        if end not in END_KINDS:
            raise UsageError(f'"end" of output {index} of the script must be stop or length.')
        times = [entry.get("first_ms", entry.get("delay_ms", 0)), entry.get("delay_ms", 0)]
        if not all(isinstance(t, (int, float)) and t >= 0 for t in times):
            raise UsageError(f"{where} has a time that is not a number of milliseconds.")
        first = chunks[0] if chunks else ""
        return Output(
            match=entry.get("match"),
            ids=tuple(self._id(chunk) for chunk in chunks),
            opened=self._id(OPENED + first),
            closed=self._id(CLOSE + first),
            end=end,
            thinking=entry.get("thinking"),
            first_s=times[0] / 1000,
            delay_s=times[1] / 1000,
        )


class ScriptedTokenizer:
    """A tokenizer whose vocabulary goes on with the script's chunks; all else is the
    tokenizer's."""

    def __init__(self, tokenizer: Any, script: Script) -> None:
        self._tokenizer = tokenizer
        padding = [b""] * (script.base - tokenizer.size)
        self.bytes_of: list[bytes] = [*tokenizer.bytes_of, *padding, *script.texts]
        self.texts: dict[int, str] = {}

    @property
    def size(self) -> int:
        return len(self.bytes_of)

    def token_bytes(self, token_id: int) -> bytes:
        return self.bytes_of[token_id] if 0 <= token_id < self.size else b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@dataclass(slots=True)
class _Playing:
    """An output being played in a slot. ids: all that it samples before its end. rest: the text
    that is left once there was a mask."""

    output: Output
    ids: tuple[int, ...]
    at: int = 0
    rest: bytes = b""


class ScriptModel(HashModel):
    """Chooses tokens from the script."""

    def __init__(self, script: Script, tokenizer: TokenTable) -> None:
        super().__init__(script.size)
        self._script = script
        self._tokenizer = tokenizer
        self._turn = 0
        self._by_bytes: dict[bytes, int] = {}
        self._longest = 0

    def token(self, slot: Slot, timeline: Timeline) -> int:
        playing, mask = self._playing(slot, timeline.tokens), slot.mask
        while True:
            if playing.rest:
                token, size = self._piece(playing.rest, mask)
                playing.rest = playing.rest[size:]
                if token >= 0:
                    return token
                continue
            if playing.at == len(playing.ids):
                return self._end(slot, playing.output)
            if mask is None:
                playing.at += 1
                return playing.ids[playing.at - 1]
            left = playing.ids[playing.at :]
            playing.at = len(playing.ids)
            playing.rest = b"".join(map(self._tokenizer.token_bytes, left))

    def _end(self, slot: Slot, output: Output) -> int:
        """What comes after the script: its end, or something that the mask allows."""
        assert slot.config is not None
        wanted: tuple[int, ...] = (self._script.filler,)
        if output.end == "stop":
            wanted = slot.config.stop_ids or self._tokenizer.end_of_turn_ids or wanted
        if slot.mask is not None:
            wanted += tuple(self._ids().get(text, -1) for text in CLOSERS)
        for token in wanted:
            if token >= 0 and _allows(slot.mask, token):
                return token
        bits = np.unpackbits(slot.mask.view(np.uint8), bitorder="little")[: self.limit]
        return int(bits.argmax()) if bits.any() else -1

    def _piece(self, text: bytes, mask: Any) -> tuple[int, int]:
        """(id of the longest start of the text that may come next, its bytes); (-1, bytes of one
        character) where there is none."""
        ids = self._ids()
        for size in range(min(self._longest, len(text)), 0, -1):
            token = ids.get(text[:size], -1)
            if token >= 0 and _allows(mask, token):
                return token, size
        size = 1
        while size < len(text) and text[size] & 0xC0 == 0x80:
            size += 1
        return -1, size

    def _ids(self) -> dict[bytes, int]:
        """The tokenizer's own ids by their bytes."""
        if not self._by_bytes:
            texts = ((self._tokenizer.token_bytes(i), i) for i in range(self._script.base))
            self._by_bytes = {text: i for text, i in texts if text}
            self._longest = max(map(len, self._by_bytes))
        return self._by_bytes

    def _playing(self, slot: Slot, prompt: list[int]) -> _Playing:
        """The output of the request in this slot; chosen when its prompt is complete."""
        if slot.script is None:
            text = self._text(prompt)
            output = self._choose(text)
            ids = output.ids
            opened = self._text(prompt[-TAIL_TOKENS:]).endswith(OPENED)
            if output.thinking is not None and output.thinking != opened:
                ids = (output.opened if output.thinking else output.closed, *ids[1:])
            slot.script = _Playing(output, ids)
        found: _Playing = slot.script
        return found

    def _choose(self, text: str) -> Output:
        for output in self._script.outputs:
            if output.match is not None and output.match in text:
                return output
        free = [o for o in self._script.outputs if o.match is None]
        if not free:
            return self._script.outputs[-1]
        self._turn += 1
        return free[(self._turn - 1) % len(free)]

    def _text(self, ids: list[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def _allows(mask: Any, token: int) -> bool:
    return mask is None or bool(int(mask[token >> 5]) >> (token & 31) & 1)


class ScriptedEngine(FakeEngine):
    """See the module's text. A wave takes as long as the slowest of its rows says."""

    def __init__(self, sizes: PoolSizes, script: Script, tokenizer: TokenTable) -> None:
        model = ScriptModel(script, tokenizer)
        super().__init__(sizes, vocab=script.size, model=model, name="scripted")
        self._prompt_s = script.prompt_s

    def _duration(self, wave: Wave) -> float:
        longest = 0.0
        for row in wave.rows:
            slot = self.state.slots[row.slot]
            if row.kind is RowKind.PREFILL:
                longest = max(longest, self._prompt_s)
            elif slot.script is not None:
                output = slot.script.output
                longest = max(longest, output.first_s if slot.sampled == 1 else output.delay_s)
        return longest
