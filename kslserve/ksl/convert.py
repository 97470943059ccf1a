"""Any readable model as one file: a container planned by the policy, or a KSL1 file.

Tensors are read, encoded and written in stripes on all cores; the same source and options give the
same bytes. Memory holds a few stripes per worker. How the file comes into being is `publish`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kslserve.ksl import container, policy
from kslserve.ksl.container_write import ContainerWriter
from kslserve.ksl.files import fail, quote, quote_path
from kslserve.ksl.ksl1 import open_ksl1
from kslserve.ksl.ksl1_write import plan_ksl1, writer
from kslserve.ksl.model import Source, read_texts
from kslserve.ksl.open import open_source
from kslserve.ksl.policy import Planned
from kslserve.ksl.publish import NewFile
from kslserve.ksl.quantize import stripes
from kslserve.ksl.synth import PREFIX

FORMATS = ("container", "ksl1")


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. size: bytes of the file."""

    path: str
    size: int
    weights: str
    head: str
    notes: tuple[str, ...]


class Progress:
    """Hears how far a conversion is; this one does nothing."""

    def advance(self, done: int, total: int) -> None:
        """Bytes of the source that were converted, and all of them."""

    def group(self, name: str, tensors: int, size: int) -> None:
        """A layer, or another part of the model, was written: tensors of it, bytes of them."""


def convert(
    source_path: str,
    destination: str,
    *,
    weights: str = "auto",
    head: str = "auto",
    file_format: str = "container",
    model_dir: str = "",
    mtp: bool = True,
    check: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> Converted:
    """Write `destination`. weights, head: as in `policy.plan`; a KSL1 file is always FP6.
    model_dir: a folder whose texts replace the source's. mtp: keep the MTP head. check: read
    everything back before the file gets its name. workers: 0 is one per core.

    ModelFileError when the source cannot be read, or the destination exists or cannot be written;
    then nothing is left behind.
    """
    if source_path.startswith(PREFIX):
        fail(quote(source_path), "a model without data cannot be converted.")
    if file_format == "ksl1" and (weights not in ("auto", "fp6") or head not in ("auto", "fp6")):
        fail(quote_path(destination), "a KSL1 file holds FP6 weights and an FP6 head only.")
    progress = progress or Progress()
    with NewFile(destination) as file:
        source = open_source(source_path, model_dir)
        try:
            read_texts(source)
            if file_format == "ksl1":
                done = _write_ksl1(source, file, mtp, workers, progress)
            else:
                if not mtp:
                    _drop_mtp(source)
                done = _write_container(source, file, weights, head, workers, progress)
        finally:
            source.close()
        if check:
            _check(file.temporary, destination, file_format)
        file.link()
    return done


def _drop_mtp(source: Source) -> None:
    source.spec = dataclasses.replace(source.spec, mtp_layers=0)
    source.stored = {n: item for n, item in source.stored.items() if not n.startswith("mtp.")}


def _write_container(
    source: Source, file: NewFile, weights: str, head: str, workers: int, progress: Progress
) -> Converted:
    plan = policy.plan(source, weights, head)
    writing = ContainerWriter(source, plan, file.put)
    file.reserve(writing.size)
    writing.write_texts()
    meter = _Meter(source, plan.tensors, progress)
    for stripe in stripes(source, plan.tensors, workers=workers, finish=writing.finish):
        writing.taken(stripe)
        meter.taken(stripe.item, stripe.end, stripe.parts)
    file.publish(writing.header(), writing.size)
    notes = (*source.notes, *plan.notes)
    return Converted(file.destination, writing.size, plan.weights, plan.head, notes)


def _write_ksl1(
    source: Source, file: NewFile, mtp: bool, workers: int, progress: Progress
) -> Converted:
    plan = plan_ksl1(source, mtp=mtp)
    file.reserve(plan.size)
    meter = _Meter(source, plan.tensors, progress)
    for stripe in stripes(source, plan.tensors, workers=workers, finish=writer(plan, file.put)):
        meter.taken(stripe.item, stripe.end, stripe.parts)
    file.publish(plan.header.pack(), plan.size)
    head = "bf16" if source.tied else "fp6"
    notes = (*source.notes, *plan.notes)
    return Converted(file.destination, plan.size, "fp6", head, notes)


class _Meter:
    """Adds up what the progress hears."""

    def __init__(self, source: Source, tensors: tuple[Planned, ...], progress: Progress) -> None:
        self._sizes = source.stored_bytes
        self._progress = progress
        self._total = sum(self._sizes[item.origin] for item in tensors)
        self._before = 0  # source bytes of whole tensors
        self._group, self._tensors, self._written = "", 0, 0
        self._left = len(tensors)

    def taken(self, item: Planned, end: int, parts: tuple[Any, ...]) -> None:
        group = group_of(item.name)
        if group != self._group:
            self._report()
            self._group = group
        self._written += sum(part.nbytes for part in parts if part is not None)
        size = self._sizes[item.origin]
        self._progress.advance(self._before + size * end // item.rows, self._total)
        if end == item.rows:
            self._before += size
            self._tensors += 1
            self._left -= 1
            if not self._left:
                self._report()

    def _report(self) -> None:
        if self._tensors:
            self._progress.group(self._group, self._tensors, self._written)
        self._tensors = self._written = 0


def group_of(name: str) -> str:
    """What is reported together: `layer N`, `mtp`, or the tensor itself."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"layer {parts[2]}"
    return "mtp" if parts[0] == "mtp" else name.removesuffix(".weight")


def _check(path: str, destination: str, file_format: str) -> None:
    """Read a published file back; ModelFileError when it is not what was written."""
    if file_format == "ksl1":
        # no checksums in it: its structure and scales are what can be checked
        open_ksl1(path).close()
        return
    wrong = container.verify(path)
    if wrong:
        fail(
            quote_path(destination),
            f"what was written reads back differently: {', '.join(wrong[:3])}.",
        )
