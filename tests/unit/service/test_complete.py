"""Text completions: sampled ids and scores in, events out; several prompts behind one face."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kslserve.core.events import CompletionDelta, CompletionEnd, Event, Failed, Finished, Started
from kslserve.core.sampling import SamplingParams
from kslserve.core.usage import FinishReason, Usage
from kslserve.errors import InvalidRequest, KslError, QueueFull
from kslserve.metrics import Metrics
from kslserve.service.complete import PARALLEL, Completions, start_completions
from kslserve.service.completion import Completion, CompletionOptions
from kslserve.service.model import ServedModel
from kslserve.service.prepare import Preparer
from kslserve.service.service import Service
from kslserve.text.bare import BareTokenizer
from kslserve.text.rendered import Rendered
from kslserve.text.template import ChatTemplate, bundled
from kslserve.text.tokenizer import Tokenizer
from tests.world import World

DATA = Path(__file__).resolve().parents[2] / "data"
TEXT = "Zürich ist 美しい. Yes."


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer((DATA / "nano_tokenizer.json").read_bytes())


def ids_of(text: str) -> list[int]:
    return [int(i) for i in tokenizer().encode_rendered(Rendered(text, False))]


class Owner:
    def __init__(self) -> None:
        self.usage = Usage()
        self.events: list[Event] = []
        self.ended: list[Completion] = []

    def began(self, cached_tokens: int) -> None:
        self.events.append(Started())

    def say(self, events: list[Event]) -> None:
        self.events += events

    def over(self, completion: Completion, events: list[Event]) -> None:
        self.events += events
        self.ended.append(completion)

    @property
    def text(self) -> str:
        return "".join(
            e.text for e in self.events if isinstance(e, CompletionDelta) and not e.prompt
        )


def completion(
    owner: Owner, *, prompt: str = "Hi", by_text: bool = True, **options: Any
) -> Completion:
    made = CompletionOptions(
        (), **{"max_tokens": 99, "sampling": SamplingParams(logprobs=1), **options}
    )
    ids = np.array(ids_of(prompt), np.int32)
    return Completion(owner, tokenizer(), made, 3, prompt if by_text else None, ids)


def score(token: int, value: float = -0.5) -> list[tuple[int, float]]:
    return [(token, value), (1, -0.25)]


@pytest.mark.parametrize("at_once", [False, True])
def test_text_and_offsets(at_once: bool) -> None:
    owner = Owner()
    sink = completion(owner)
    sink.admitted(0)
    ids = ids_of(TEXT)
    for part in [ids] if at_once else [[i] for i in ids]:
        sink.tokens(part, [score(i) for i in part])
    sink.ended(FinishReason.STOP, None)
    assert owner.text == TEXT
    deltas = [e for e in owner.events if isinstance(e, CompletionDelta)]
    assert [i for d in deltas for i in d.ids] == ids
    scores = [s for d in deltas for s in d.scores]
    assert [s.token for s in scores] == [tokenizer().token_bytes(i) for i in ids]
    for found in scores:
        if b"\x00" <= found.token[:1] < b"\x80" and found.token.isascii():
            assert TEXT.startswith(found.token.decode(), found.offset)
        assert dict(found.top)[found.token] == found.logprob
    assert owner.usage.completion_tokens == len(ids)
    assert owner.events[-1] == CompletionEnd(3, FinishReason.STOP)


def test_stop_strings_cut_text_and_tokens() -> None:
    owner = Owner()
    cancels: list[Any] = []
    sink = completion(owner, stop=("Yes",), sampling=SamplingParams())
    sink.attach(cancels.append)
    sink.admitted(0)
    sink.tokens(ids_of(TEXT + " No more of this."), None)
    assert owner.text == TEXT.partition("Yes")[0]
    assert owner.events[-1] == CompletionEnd(3, FinishReason.STOP_STRING, "Yes")
    assert cancels == [None]
    assert owner.usage.completion_tokens < len(ids_of(TEXT + " No more of this."))
    sink.tokens([5], None)
    sink.ended(FinishReason.CANCELLED, None)
    assert owner.ended == [sink]


def test_held_text_comes_at_the_end() -> None:
    owner = Owner()
    sink = completion(owner, stop=("Yes, sir",))
    sink.admitted(0)
    sink.tokens(ids_of("Yes"), None)
    assert owner.text == ""
    sink.ended(FinishReason.LENGTH, None)
    assert owner.text == "Yes"
    half = completion(owner := Owner())
    half.admitted(0)
    half.tokens([next(i for i, b in enumerate(tokenizer().bytes_of) if b == b"\xe7")], None)
    half.ended(FinishReason.LENGTH, None)
    assert owner.text == "\ufffd"


@pytest.mark.parametrize("by_text", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echo(by_text: bool, max_tokens: int) -> None:
    owner = Owner()
    prompt = "<|im_start|>" + TEXT
    sink = completion(owner, prompt=prompt, by_text=by_text, echo=True, max_tokens=max_tokens)
    sink.admitted(0)
    ids = ids_of(prompt)
    sink.tokens([], [score(i) for i in ids[1:4]])
    sink.tokens([], [score(i) for i in ids[4:]])
    assert owner.events == [Started()]
    sink.tokens([7], [score(7)])
    sink.ended(FinishReason.LENGTH, None)
    echoed = owner.events[1]
    assert isinstance(echoed, CompletionDelta)
    assert echoed.prompt
    assert echoed.text == prompt
    assert list(echoed.ids) == ids
    assert [s.logprob for s in echoed.scores] == [None, *[-0.5] * (len(ids) - 1)]
    assert echoed.scores[1].offset == len("<|im_start|>")
    assert owner.usage.completion_tokens == (1 if max_tokens else 0)
    assert (owner.text == "") is (max_tokens == 0)
    after = [s for e in owner.events[2:] if isinstance(e, CompletionDelta) for s in e.scores]
    assert [s.offset for s in after] == ([len(prompt)] if max_tokens else [])


# ---------------------------------------------------------------- several prompts


class Many:
    """A service on a fake engine in virtual time."""

    def __init__(self, **limits: Any) -> None:
        self.world = World(limits=limits, options={"vocab": tokenizer().size})
        found = tokenizer()
        self.service = Service(
            ServedModel("m", 256, SamplingParams(), "fp", (), found.size, 0),
            found,
            Preparer(found, ChatTemplate(bundled("3.5"), found.control_tokens), 256),
            self.world.scheduler,
            Metrics(),
        )
        self.batches: list[list[Event]] = []

    async def start(self, *prompts: Any, **options: Any) -> Completions:
        made = CompletionOptions(
            prompts, **{"max_tokens": 3, "sampling": SamplingParams(), **options}
        )
        return await start_completions(self.service, made, self.batches.append)

    def finish(self) -> list[Event]:
        self.world.run()
        self.service.close()
        self.world.check_all_free()
        assert self.service.live == 0
        events = [event for batch in self.batches for event in batch]
        assert sum(isinstance(e, Started) for e in events) <= 1
        assert sum(isinstance(e, (Finished, Failed)) for e in events) == 1
        return events


async def test_many_prompts_end_once() -> None:
    many = Many()
    prompts = [[1 + i, 2, 3] for i in range(3 * PARALLEL)]
    running = await many.start(*prompts)
    assert many.service.live == PARALLEL
    events = many.finish()
    assert isinstance(events[0], Started)
    last = events[-1]
    assert last == Finished(FinishReason.STOP, running.usage)
    assert running.reason is FinishReason.STOP
    ends = [e for e in events if isinstance(e, CompletionEnd)]
    assert sorted(e.index for e in ends) == list(range(len(prompts)))
    assert running.usage.prompt_tokens == 9 * PARALLEL
    assert running.usage.completion_tokens == 9 * PARALLEL


async def test_one_failure_ends_all() -> None:
    many = Many()
    running = await many.start(*[[1, 2, 3]] * (2 * PARALLEL), max_tokens=100)
    error = KslError("boom.")
    next(iter(running._running)).cancel(error)
    events = many.finish()
    assert events[-1] == Failed(error, running.usage)
    assert running.reason is None


async def test_a_client_that_leaves() -> None:
    many = Many()
    running = await many.start(*[[1, 2, 3]] * (2 * PARALLEL), max_tokens=100)
    running.cancel()
    events = many.finish()
    assert events[-1] == Finished(FinishReason.CANCELLED, running.usage)


async def test_a_full_queue() -> None:
    many = Many(max_queue=0, max_seqs=2)
    running = await many.start(*[[1, 2, 3]] * PARALLEL, max_tokens=100)
    assert many.service.live == 2
    with pytest.raises(QueueFull):
        await many.start([1, 2, 3])
    events = many.finish()
    assert events[-1] == Finished(FinishReason.STOP, running.usage)
    assert sum(isinstance(e, CompletionEnd) for e in events) == PARALLEL


@pytest.mark.parametrize("prompt", [[], [1 << 20], "", "word " * 300])
async def test_bad_prompts(prompt: Any) -> None:
    many = Many()
    with pytest.raises(InvalidRequest):
        await many.start([1], prompt)
    assert many.service.live == 0
    many.service.close()


async def test_texts_are_tokenized_as_they_are() -> None:
    many = Many()
    await many.start("<|im_start|>", [1, 2], echo=True, max_tokens=0)
    events = many.finish()
    texts = {e.index: e.text for e in events if isinstance(e, CompletionDelta)}
    assert texts[0] == "<|im_start|>"


def test_a_bare_tokenizer_has_no_text() -> None:
    bare = BareTokenizer(9, (3,))
    assert (bare.size, bare.end_of_turn_ids, bare.token_bytes(4)) == (9, (3,), b"")
    bare.require_control_ids()
    assert bare.id_of("<think>") is None
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        bare.encode_rendered(Rendered("words", False))
    with pytest.raises(InvalidRequest):
        bare.encode_plain(["words"])
