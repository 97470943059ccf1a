"""Which tensor gets which encoding.

    tensor                          fp6     nvfp4              nvfp4-mlp
    gate, up, down                  e2m3    nvfp4              nvfp4
    other projections               e2m3    nvfp4              e2m3
    head                            e2m3    e2m3               e2m3        (or as --head says)
    MTP matrices                    e2m3    e2m3               e2m3
    everything else                 as in the source

`bf16` quantizes nothing. A tied head that is quantized is a second tensor, lm_head.weight, made
from the embedding. A matrix whose columns do not fit its encoding stays as it is.

A file that was quantized elsewhere (KSL1) gets what the table asks where it left a choice. Its FP6
matrices may become NVFP4: there is often no original at hand, and a note tells of the second
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from kslserve.engine.codecs import ENC_BF16, ENC_E2M3, ENC_F32, ENC_FP8, ENC_NVFP4, ENCODING_NAMES
from kslserve.ksl.files import fail, quote_path
from kslserve.ksl.layout import EMBEDDING, HEAD, Stored, role
from kslserve.ksl.model import Source

WEIGHTS = ("fp6", "nvfp4", "nvfp4-mlp", "bf16")
HEADS = ("fp6", "nvfp4", "bf16")
DEFAULT_WEIGHTS = "fp6"  # of a source that was not quantized by a policy

_TABLE: dict[str, dict[str, int]] = {
    "fp6": {"mlp": ENC_E2M3, "projection": ENC_E2M3, "mtp": ENC_E2M3},
    "nvfp4": {"mlp": ENC_NVFP4, "projection": ENC_NVFP4, "mtp": ENC_E2M3},
    "nvfp4-mlp": {"mlp": ENC_NVFP4, "projection": ENC_E2M3, "mtp": ENC_E2M3},
    "bf16": {},
}
_HEAD: dict[str, int | None] = {"fp6": ENC_E2M3, "nvfp4": ENC_NVFP4, "bf16": None}
_COLUMN_UNIT = {ENC_E2M3: 4, ENC_NVFP4: 16}
_PLAIN = (ENC_F32, ENC_BF16, ENC_FP8)  # encodings from which another may be made


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor to serve or write: `name` in `encoding`, made from the source's tensor
    `origin`."""

    name: str
    origin: str
    encoding: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Tensors in file order, the labels of their encodings, and notes for people."""

    tensors: tuple[Planned, ...]
    weights: str
    head: str
    notes: tuple[str, ...]


def plan(source: Source, weights: str = "auto", head: str = "auto") -> Plan:
    """What to make of a source. weights: `auto` (a container's own, else fp6) or one of WEIGHTS;
    head: `auto` or one of HEADS. ModelFileError when a quantized tensor would have to be quantized
    anew."""
    own = source.weights
    keep = bool(own) and not source.foreign and weights in ("auto", own)
    label = (own or DEFAULT_WEIGHTS) if weights == "auto" else weights
    notes: list[str] = []
    if not keep and own not in ("", "bf16") and label == "bf16":
        _refuse(source, f"it holds {own} weights, from which bf16 cannot be made")
    tensors: list[Planned] = []
    for name, item in source.stored.items():
        if name == HEAD:
            continue
        target = None if keep else _TABLE[label].get(role(name) or "")
        encoding = _settle(source, name, item, target, notes)
        tensors.append(Planned(name, name, encoding, item.rows, item.cols))
    kept = sum(item.encoding == ENC_FP8 and item.name not in source.sealed for item in tensors)
    if kept:
        notes.append(f"{kept} matrices stay block-FP8, as they are stored")
    if head == "auto":
        head_label = source.head if keep else ("bf16" if label == "bf16" else "fp6")
    else:
        head_label = head
    entry = _plan_head(source, head_label, keep and head == "auto", notes)
    if entry is None or entry.encoding in _PLAIN:
        head_label = "bf16"
    if entry is not None:
        tensors.append(entry)
    twice = sum(_is_second(source.stored[item.origin], item) for item in tensors)
    if twice:
        notes.append(
            f"{twice} matrices are made from FP6 and so rounded twice; from the original model "
            "they would be more accurate"
        )
    return Plan(tuple(tensors), label, head_label, tuple(notes))


def _plan_head(source: Source, label: str, keep: bool, notes: list[str]) -> Planned | None:
    """The tensor lm_head.weight; None when the embedding serves as head."""
    stored = source.stored.get(HEAD)
    target = _HEAD[label]
    if stored is not None and (keep or stored.encoding == target):
        return Planned(HEAD, HEAD, stored.encoding, stored.rows, stored.cols)
    if not source.tied:
        assert stored is not None, "an untied model has a head"
        if target is None and stored.encoding not in _PLAIN:
            _refuse(source, "it holds a quantized head, from which bf16 cannot be made")
        encoding = _settle(source, HEAD, stored, target, notes)
        return Planned(HEAD, HEAD, encoding, stored.rows, stored.cols)
    if target is None or keep:
        return None
    embedding = source.stored[EMBEDDING]
    encoding = _settle(source, HEAD, embedding, target, notes)
    if encoding != target:
        return None
    return Planned(HEAD, EMBEDDING, encoding, embedding.rows, embedding.cols)


def _settle(source: Source, name: str, item: Stored, target: int | None, notes: list[str]) -> int:
    """The encoding that a tensor gets when the table asks for `target`."""
    if target is None or item.encoding == target or name in source.sealed:
        return item.encoding
    second = source.foreign and (item.encoding, target) == (ENC_E2M3, ENC_NVFP4)
    if item.encoding not in _PLAIN and not second:
        found = ENCODING_NAMES[item.encoding]
        _refuse(source, f"{name} is {found} already, and quantizing it again would lose accuracy")
    unit = _COLUMN_UNIT[target]
    if item.cols % unit:
        notes.append(
            f"{name} stays {ENCODING_NAMES[item.encoding]}: its {item.cols} columns are no "
            f"multiple of {unit}"
        )
        return item.encoding
    return target


def _is_second(stored: Stored, item: Planned) -> bool:
    return (stored.encoding, item.encoding) == (ENC_E2M3, ENC_NVFP4)


def _refuse(source: Source, reason: str) -> None:
    fail(quote_path(source.where), f"{reason}; use --weights auto, or convert the original model.")
