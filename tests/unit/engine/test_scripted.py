"""The scripted engine: texts come out as written, one token per chunk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason
from kslserve.engine.fakemodel import Timeline
from kslserve.engine.model import PoolSizes
from kslserve.engine.scripted import Script, ScriptedEngine, ScriptedTokenizer
from kslserve.engine.types import SlotConfig
from kslserve.errors import UsageError
from kslserve.metrics import Metrics
from kslserve.sched.scheduler import Job, SchedLimits, Scheduler
from kslserve.text.detokenizer import Detokenizer
from kslserve.text.tokenizer import Tokenizer
from tests.world import Recorder

DATA = Path(__file__).resolve().parents[2] / "data"
SIZES = PoolSizes(slots=2, slabs=2, blocks=64, block_tokens=16, blocks_per_slot=32, wave_columns=64)
LIMITS = SchedLimits(2, 8, 64, 50.0, 250.0, 0.0, 0.0, 512)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer((DATA / "nano_tokenizer.json").read_bytes())


class Talk:
    """Asks a scripted engine and gives back (text, reason, tokens)."""

    def __init__(self, tokenizer: Tokenizer, outputs: list[dict[str, Any]]) -> None:
        script = Script({"outputs": outputs}, tokenizer.size)
        self.base, self.texts = script.base, script.texts
        self.tokenizer = ScriptedTokenizer(tokenizer, script)
        self.engine = ScriptedEngine(SIZES, script, self.tokenizer)
        self.scheduler = Scheduler(self.engine, LIMITS, Metrics())
        self.scheduler.start()

    async def ask(
        self, prompt: str, limit: int = 20, *, stops: bool = True
    ) -> tuple[str, FinishReason | None, int]:
        recorder = Recorder()
        stop_ids = self.tokenizer.end_of_turn_ids if stops else ()
        ids = self.tokenizer.encode(prompt)
        self.scheduler.submit(Job(ids, limit, SamplingParams(), 1, stop_ids), recorder)
        await self.scheduler._wait_idle()
        detokenizer = Detokenizer(self.tokenizer)  # type: ignore[arg-type]
        text = detokenizer.feed(recorder.ids) + detokenizer.flush()
        return text, recorder.reason, len(recorder.ids)


async def test_chunks_are_tokens(tokenizer: Tokenizer) -> None:
    talk = Talk(tokenizer, [{"chunks": ["Hel", "lo <tool_call>\n", "", "é🙂"], "end": "stop"}])
    assert await talk.ask("hi") == ("Hello <tool_call>\né🙂", FinishReason.STOP, 5)


async def test_output_limit(tokenizer: Tokenizer) -> None:
    talk = Talk(tokenizer, [{"chunks": ["one", " two", " three"]}])
    assert await talk.ask("hi", 2) == ("one two", FinishReason.LENGTH, 2)


async def test_end_by_length_runs_to_the_limit(tokenizer: Tokenizer) -> None:
    talk = Talk(tokenizer, [{"chunks": ["one"], "end": "length"}])
    assert await talk.ask("hi", 7) == ("one", FinishReason.LENGTH, 7)


async def test_without_stop_ids_the_end_token_repeats(tokenizer: Tokenizer) -> None:
    talk = Talk(tokenizer, [{"chunks": ["one"]}])
    assert await talk.ask("hi", 5, stops=False) == ("one", FinishReason.LENGTH, 5)


async def test_outputs_in_order_and_by_prompt(tokenizer: Tokenizer) -> None:
    talk = Talk(
        tokenizer,
        [{"chunks": ["a"]}, {"match": "magic", "chunks": ["m"]}, {"chunks": ["b"]}],
    )
    prompts = ["x", "say magic", "x", "x" * 200, "the magic word"]
    assert [(await talk.ask(p))[0] for p in prompts] == ["a", "m", "b", "a", "m"]


@pytest.mark.parametrize(
    ("prompt", "thinking", "text"),
    [
        ("<|im_start|>assistant\n<think>\n", False, "</think>\n\nyes"),
        ("<|im_start|>assistant\n<think>\n", True, "yes"),
        ("<|im_start|>assistant\n<think>\n", None, "yes"),
        ("<think>\n\n</think>\n\n", True, "<think>\nyes"),
        ("<think>\n\n</think>\n\n", False, "yes"),
    ],
)
async def test_thinking_state(
    tokenizer: Tokenizer, prompt: str, thinking: bool | None, text: str
) -> None:
    """The missing tag is part of the first token."""
    entry = {"chunks": ["y", "es"]} | ({} if thinking is None else {"thinking": thinking})
    talk = Talk(tokenizer, [entry])
    assert await talk.ask(prompt) == (text, FinishReason.STOP, 3)


async def test_delays_are_wave_times(tokenizer: Tokenizer) -> None:
    talk = Talk(tokenizer, [{"chunks": ["a", "b"], "first_ms": 30, "delay_ms": 10}])
    times: list[float] = []
    on_done = talk.engine._on_done
    assert on_done is not None

    def spy(done: Any) -> None:
        times.append((done.ended_ns - done.started_ns) / 1e6)
        on_done(done)

    talk.engine._on_done = spy
    await talk.ask("hi")
    assert times == pytest.approx([30, 10, 10], abs=0.01)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "outputs"),
        ({"outputs": []}, "outputs"),
        ({"outputs": [{"chunks": "abc"}]}, "chunks"),
        ({"outputs": [{"chunks": [], "end": "sometime"}]}, "end"),
        ({"outputs": [{"chunks": [], "delay_ms": "1"}]}, "milliseconds"),
        ({"outputs": [{"chunks": [], "typo": 1}]}, "keys"),
        ({"outputs": [{"chunks": []}], "prompt_ms": -1}, "prompt_ms"),
    ],
)
def test_bad_scripts(data: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Script(data, 100)


def test_script_files(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    with pytest.raises(UsageError, match="Cannot read"):
        Script.load(str(path), 10)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="not JSON"):
        Script.load(str(path), 10)
    path.write_text(json.dumps({"outputs": [{"chunks": ["a", "b", "a"]}]}), encoding="utf-8")
    script = Script.load(str(path), 10)
    assert script.outputs[0].ids == (11, 12, 11)


def masked(talk: Talk, texts: str, *ids: int) -> list[int]:
    """What a slot samples until its end under a mask that allows the tokenizer's ids made of these
    characters, and `ids`."""
    width = talk.engine.info.vocab
    mask = np.zeros((width + 31) // 32, np.uint32)
    found = talk.tokenizer.bytes_of[: talk.base]
    fits = [i for i, text in enumerate(found) if text and not set(text) - set(texts.encode())]
    for token in (*fits, *ids):
        mask[token >> 5] |= np.uint32(1 << (token & 31))
    slot, timeline, sampled = talk.engine.state.slots[0], Timeline(), []
    slot.configure(SlotConfig(SamplingParams(), 1, (END,)))
    slot.mask = mask
    timeline.append(1)
    for _ in range(12):
        token = talk.engine.state.model.token(slot, timeline)
        assert int(mask[token >> 5]) >> (token & 31) & 1
        sampled.append(token)
        if token == END:
            break
    return sampled


END = 3  # allowed as an end where a test says so


def text_of(talk: Talk, ids: list[int]) -> str:
    return b"".join(map(talk.tokenizer.token_bytes, ids)).decode()


async def test_under_a_mask_text_is_made_of_the_tokenizers_ids(tokenizer: Tokenizer) -> None:
    talk = Talk(tokenizer, [{"chunks": ["12", "x", "34</think>", "5"]}])
    close = tokenizer.id_of("</think>")
    assert close is not None
    sampled = masked(talk, "12345", talk.base + talk.texts.index(b"12"), close, END)
    assert sampled[-1] == END
    assert text_of(talk, sampled[:-1]) == "1234</think>5"
    assert close in sampled
    assert max(sampled) < talk.base


async def test_forbidden_text_is_left_out(tokenizer: Tokenizer) -> None:
    talk = Talk(tokenizer, [{"chunks": ["Sure: é🙂", "a 12", "3 ", "ok"]}])
    sampled = masked(talk, "123", END)
    assert text_of(talk, sampled[:-1]) == "123"
    assert sampled[-1] == END
    assert max(sampled) < talk.base


async def test_after_the_script_anything_allowed_goes_on(tokenizer: Tokenizer) -> None:
    talk = Talk(tokenizer, [{"chunks": ["no"]}])
    sampled = masked(talk, "7")
    assert set(text_of(talk, sampled)) == {"7"}
    assert len(sampled) == 12
    talk = Talk(tokenizer, [{"chunks": ["7"]}])
    assert text_of(talk, masked(talk, '7"')[:3]) == '7""', "what closes comes first"
