"""The start message: what was loaded, what it takes, how it samples."""

from __future__ import annotations

from collections.abc import Sequence

from kslserve.config import Settings
from kslserve.core.sampling import SamplingParams
from kslserve.engine.budget import kv_token_bytes, slot_bytes
from kslserve.engine.equality import Equality
from kslserve.engine.model import ModelSpec
from kslserve.engine.types import EngineInfo
from kslserve.ksl.model import ModelFile
from kslserve.sched.spec.policy import SpecPolicy
from kslserve.service.model import ServedModel
from kslserve.startup.pools import PoolPlan, kv_format, size, slab_bytes, workspace_bytes


def describe(
    model: ModelFile,
    info: EngineInfo,
    served: ServedModel,
    version: str,
    notes: Sequence[str],
    drafts: SpecPolicy | None,
) -> list[str]:
    """The lines of the message. notes: sentences at its end."""
    spec = model.spec
    parameters = _parameter_count(model)
    shape = f"{spec.layers} layers" + (", MTP head" if info.has_mtp else "")
    if parameters:
        shape += f", {parameters / 1e6:.1f} M parameters, {model.weights} (head {model.head})"
    engine = f"{info.name} engine"
    if info.isa:
        engine += f", {info.isa}, {info.threads} thread{'s' * (info.threads != 1)}"
    tokens = info.blocks * info.block_tokens
    kv_bytes = info.blocks * info.block_bytes + tokens * info.kv_code_bytes
    reads = f"; reads {size(info.token_bytes)} of weights per token" if info.token_bytes else ""
    total = info.weight_bytes + info.pool_bytes + info.scratch_bytes
    lines = [
        f"model     {model.name}: {shape}, template {version}",
        f"source    {model.source}",
        f"engine    {engine}, {info.activation} activations{reads}",
        f"equality  {describe_equality(info.equality)}",
        f"memory    weights {size(info.weight_bytes)}, KV {tokens} tokens {size(kv_bytes)} "
        f"({info.kv_format}), {info.slots} slabs {size(info.slots * info.slab_bytes)}, "
        f"checkpoints {size((info.slabs - info.slots) * info.slab_bytes)}, "
        f"scratch {size(info.scratch_bytes)}: {size(total)} when all of it is in use",
        f"context   {served.context} tokens, {info.slots} requests at once",
        f"sampling  {describe_sampling(served.defaults)}",
        f"drafts    {describe_drafts(drafts)}",
    ]
    said = [info.note] if info.note else []
    return lines + [f"note      {note}" for note in [*said, *notes]]


def plan_line(
    settings: Settings,
    spec: ModelSpec,
    plan: PoolPlan,
    weights: int,
    free: int,
    code_bytes: int = 0,
) -> str:
    """What is about to be taken. weights: their encoded bytes. free: before that. code_bytes: as in
    plan_pools."""
    sizes, kv = plan.sizes, kv_format(settings)
    tokens = sizes.blocks * sizes.block_tokens
    slots = sizes.slots * slot_bytes(spec, sizes.blocks_per_slot)
    workspace = workspace_bytes(settings, spec, sizes.slots)
    kv_bytes = tokens * (kv_token_bytes(spec, kv) + code_bytes)
    slabs = sizes.slabs * slab_bytes(settings, spec)
    total = weights + kv_bytes + slabs + slots + workspace
    kind = "reserved, taken as it is used" if settings.device != "cuda" else "taken now"
    return (
        f"memory plan: weights {size(weights)}, KV {tokens} tokens {size(kv_bytes)} ({kv}), "
        f"{sizes.slabs} slabs {size(slabs)}, slots {size(slots)}, activations {size(workspace)}: "
        f"{size(total)} of {size(free)}, {kind}; automatic sizes leave {size(plan.margin)} alone"
    )


def describe_tiers(settings: Settings, host_bytes: int) -> list[str]:
    """Where checkpoints go that leave the engine's memory: a line, or none."""
    tiers = [f"{size(host_bytes)} of host memory"] if host_bytes else []
    if settings.prefix_cache and settings.prefix_cache_dir:
        tiers.append(f"{size(settings.prefix_cache_disk_bytes)} in {settings.prefix_cache_dir}")
    return [f"tiers     checkpoints also in {' and '.join(tiers)}"] if tiers else []


def describe_equality(equality: Equality) -> str:
    """How far results depend on how they are computed: properties of equal closeness together."""
    groups: dict[str, list[str]] = {}
    for name, closeness in equality.properties().items():
        groups.setdefault(str(closeness), []).append(name.replace("_", " "))
    parts = [f"{', '.join(names)}: {text}" for text, names in groups.items()]
    within = [f"all bit among {scope}"] if (scope := equality.scope()) else []
    return "; ".join(parts + within)


def describe_drafts(drafts: SpecPolicy | None) -> str:
    if drafts is None:
        return "none"
    kinds = ["the MTP head"] * drafts.mtp + ["the text so far"] * drafts.ngram
    return f"from {' and '.join(kinds)}, at most {drafts.lanes} per request and wave"


def describe_sampling(defaults: SamplingParams) -> str:
    if defaults.temperature == 0:
        return "greedy (temperature 0) unless a request says otherwise"
    parts = [f"temperature {defaults.temperature:g}"]
    if defaults.top_p < 1:
        parts.append(f"top_p {defaults.top_p:g}")
    if defaults.top_k > 0:
        parts.append(f"top_k {defaults.top_k}")
    if defaults.min_p > 0:
        parts.append(f"min_p {defaults.min_p:g}")
    if defaults.presence_penalty:
        parts.append(f"presence_penalty {defaults.presence_penalty:g}")
    if defaults.repetition_penalty != 1:
        parts.append(f"repetition_penalty {defaults.repetition_penalty:g}")
    return ", ".join(parts)


def _parameter_count(model: ModelFile) -> int:
    """Parameters of the model; a second copy of a tied head is none."""
    config = model.config.get("text_config", model.config)
    tied = config.get("tie_word_embeddings", model.config.get("tie_word_embeddings", False))
    return sum(t.rows * t.cols for t in model.tensors if not (tied and t.name == "lm_head.weight"))
