"""From settings to an open engine and the texts beside it. Runs in a thread while the server
already answers.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from kslserve import heap
from kslserve.config import Settings
from kslserve.core.sampling import SamplingParams
from kslserve.engine.codecs import encoded_bytes
from kslserve.engine.fake import FakeEngine
from kslserve.engine.fingerprint import fingerprint, head_fingerprint
from kslserve.engine.model import ModelSpec, PoolSizes
from kslserve.engine.scripted import Script, ScriptedEngine, ScriptedTokenizer
from kslserve.engine.types import Engine, EngineInfo
from kslserve.errors import ModelFileError
from kslserve.ksl.model import ModelFile, read_texts
from kslserve.ksl.open import open_model, open_source
from kslserve.sched.cache.diskstore import DiskStore, Scan, StateSizes, own_folder
from kslserve.sched.spec.policy import SpecPolicy
from kslserve.service.grammar import GrammarError, Grammars
from kslserve.service.model import ServedModel
from kslserve.service.turnstore import Kept, TurnStore
from kslserve.startup.device import free_bytes, open_library, place
from kslserve.startup.lines import describe, describe_tiers, plan_line
from kslserve.startup.pools import (
    free_memory_bytes,
    host_tier_bytes,
    kv_format,
    plan_pools,
)
from kslserve.startup.speculation import leave_unused_head, spec_policy
from kslserve.text.bare import BareTokenizer
from kslserve.text.template import ChatTemplate, bundled
from kslserve.text.tokenizer import Tokenizer

FALLBACK_TEMPLATE = "3.5"


@dataclass(frozen=True, slots=True)
class Backend:
    """Everything that serving needs and that takes time to make. drafts: None for no speculation.
    disk, scan, turns, kept: the disk tier and what it holds, where there is one. idle_return_s: 0
    where the memory is not the machine's. host_bytes: of the prefix cache's host tier. lines: for
    the start message."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    model: ServedModel
    grammars: Grammars
    drafts: SpecPolicy | None
    disk: DiskStore | None
    scan: Scan | None
    turns: TurnStore | None
    kept: list[Kept]
    idle_return_s: float
    host_bytes: int
    lines: tuple[str, ...]


def open_backend(settings: Settings, log_line: Callable[[str], None]) -> Backend:
    """Open the model and the engine. log_line hears of slow steps. Raises UsageError
    (ModelFileError included) or EngineError with one sentence."""
    if settings.prefix_cache and settings.prefix_cache_dir:
        own_folder(settings.prefix_cache_dir)  # refused before the weights are read
    model = _open_model(settings, log_line)
    with model:
        leave_unused_head(settings, model)
        settings = place(settings, model.spec)
        notes = list(model.notes)
        tokenizer = own = _tokenizer(settings, model, notes)
        script = None
        if settings.engine == "scripted":
            script = Script.load(settings.script, tokenizer.size)
            tokenizer = cast(Tokenizer, ScriptedTokenizer(tokenizer, script))
        source = model.chat_template
        if source is None:
            source = bundled(FALLBACK_TEMPLATE)
            if model.tokenizer_json is not None:
                notes.append(f"no chat template: the {FALLBACK_TEMPLATE} one is used")
        template = ChatTemplate(source, tokenizer.control_tokens)
        weights, free = encoded_bytes(model.tensors), free_bytes(settings)
        codes = _code_bytes(settings, model.spec)
        plan = plan_pools(settings, model.spec, free - weights, codes)
        log_line(plan_line(settings, model.spec, plan, weights, free, codes))
        notes += plan.notes
        # Refused before the weights are read.
        drafts = spec_policy(settings, settings.engine == "native" and model.spec.mtp_layers > 0)
        engine = _open_engine(settings, model, plan.sizes, tokenizer, script)
        identity = fingerprint(model.spec, model.tensors, engine.info)
        served = ServedModel(
            name=model.name,
            context=plan.context,
            defaults=sampling_defaults(model),
            fingerprint="ksl_" + identity[:12],
            stop_ids=tokenizer.end_of_turn_ids,
            vocab=tokenizer.size,
            created=int(time.time()),
            equality=engine.info.equality.texts(),
        )
        # Under a mask a script speaks in the tokenizer's own ids.
        grammars = Grammars(own, engine.info.vocab)
        if model.tokenizer_json is not None:
            try:
                grammars.build()  # later it would hold up every stream for most of a second
            except GrammarError as error:
                notes.append(str(error))
        host = host_tier_bytes(settings, free_memory_bytes()) if settings.prefix_cache else 0
        lines = describe(model, engine.info, served, template.version, notes, drafts)
        lines += describe_tiers(settings, host)
        disk = _open_disk(settings, identity, head_fingerprint(model.tensors), engine.info)
        scan, turns, kept = None, None, []
        if disk is not None:
            scan = disk.scan()
            size = settings.prefix_cache_disk_bytes
            turns = TurnStore(disk.folder, disk.sizes.fingerprint, size)
            kept = turns.load()
    gc.collect()  # readers of weights and their buffers refer to each other
    heap.trim()
    return Backend(
        engine, tokenizer, template, served, grammars, drafts, disk, scan, turns, kept,
        0.0 if settings.device == "cuda" else settings.idle_return_s, host, tuple(lines),
    )  # fmt: skip


def _tokenizer(settings: Settings, model: ModelFile, notes: list[str]) -> Tokenizer:
    """The model's tokenizer; without one only token ids can be served, which a note says."""
    if model.tokenizer_json is None:
        if settings.engine == "scripted":
            raise ModelFileError(f"{settings.model} has no tokenizer.json, which a script needs.")
        notes.append(
            "no tokenizer.json (name a folder with one by --model-dir): only /v1/completions "
            "works, with token ids"
        )
        return BareTokenizer(model.spec.vocab, model.generation.eos_ids)
    tokenizer = Tokenizer(model.tokenizer_json, model.generation.eos_ids)
    tokenizer.require_control_ids()
    return tokenizer


def _open_model(settings: Settings, log_line: Callable[[str], None]) -> ModelFile:
    """The whole model for the native engine, and only its texts and shapes for the others."""
    if settings.engine == "native":
        return open_model(
            settings.model,
            weights=settings.weights,
            head=settings.head,
            model_dir=settings.model_dir,
            progress=_Quantizing(log_line),
        )
    source = open_source(settings.model, settings.model_dir)
    try:
        texts = read_texts(source)
    except BaseException:
        source.close()
        raise
    return ModelFile(
        name=source.name,
        source=source.description,
        spec=texts.spec,
        tensors=[],
        weights="none",
        head="none",
        tokenizer_json=texts.tokenizer_json,
        chat_template=texts.chat_template,
        config=source.config,
        generation=texts.generation,
        notes=tuple(source.notes),
        on_close=source.close,
    )


class _Quantizing:
    """Says once that quantizing takes a while."""

    def __init__(self, log_line: Callable[[str], None]) -> None:
        self._log_line: Callable[[str], None] | None = log_line

    def __call__(self, name: str) -> None:
        if self._log_line is not None:
            self._log_line(
                "quantizing the weights; `kslserve convert` saves this for the next start"
            )
            self._log_line = None


def _code_bytes(settings: Settings, spec: ModelSpec) -> int:
    """What the engine holds of a token beside its keys and values."""
    if settings.engine != "native" or settings.device == "cuda":
        return 0
    from kslserve.engine.native import kv_code_bytes

    return kv_code_bytes(spec, kv_format(settings), settings.activations, settings.cpu)


def _open_engine(
    settings: Settings,
    model: ModelFile,
    sizes: PoolSizes,
    tokenizer: Tokenizer,
    script: Script | None,
) -> Engine:
    if script is not None:
        return ScriptedEngine(sizes, script, tokenizer)
    if settings.engine == "fake":
        return FakeEngine(sizes, vocab=tokenizer.size, strict=False)
    # Imported here: the other engines also work where the extension was not built.
    from kslserve.engine.native import NativeEngine

    return NativeEngine.open(
        model.spec,
        model.tensors,
        sizes,
        kv_format=kv_format(settings),
        activations=settings.activations,
        isa=settings.cpu,
        threads=settings.threads,
        # A thread that feeds a device hardly computes, and late launches would cost it.
        nice=0 if settings.device == "cuda" else settings.cpu_nice,
        draft_margin=settings.draft_margin,
        draft_vocab=settings.draft_vocab,
        test_hooks=settings.test_hooks,
        library=open_library(settings),
    )


def _open_disk(
    settings: Settings, identity: str, head: bytes, info: EngineInfo
) -> DiskStore | None:
    """The disk tier of the prefix cache, for state of exactly this model and build."""
    if not (settings.prefix_cache and settings.prefix_cache_dir):
        return None
    sizes = StateSizes(
        bytes.fromhex(identity), info.slab_bytes, info.block_bytes, info.block_tokens, head
    )
    return DiskStore(settings.prefix_cache_dir, sizes)


def sampling_defaults(model: ModelFile) -> SamplingParams:
    given = model.generation
    return SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        repetition_penalty=given.repetition_penalty,
    )
