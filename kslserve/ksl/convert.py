"""Any readable model as a container: planned by the policy, encoded and written tensor by tensor.

The same source and options give the same bytes. Memory holds one tensor at a time. Nothing is
overwritten: the file is written under a temporary name beside its destination, read back against
its checksums, and then given its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from kslserve.engine.codecs import ENCODING_NAMES
from kslserve.engine.model import TensorArg
from kslserve.errors import ModelFileError
from kslserve.ksl import policy
from kslserve.ksl.container import (
    ALIGN_BYTES,
    BLOCKS,
    FORMAT,
    VERSION,
    Part,
    logical_shape,
    parts_of,
    verify,
)
from kslserve.ksl.files import fail, quote, quote_path
from kslserve.ksl.layout import Stored
from kslserve.ksl.model import TEXT_FILES, Source, read_texts
from kslserve.ksl.open import open_source
from kslserve.ksl.quantize import reencode
from kslserve.ksl.synth import PREFIX

_NO_DIGEST = "0" * 64  # holds the place of a checksum until the tensor was written


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written. size: bytes of the file."""

    path: str
    size: int
    weights: str
    head: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Item:
    """A planned tensor and its entries."""

    planned: policy.Planned
    stored: Stored
    parts: list[Part]


def convert(
    source_path: str,
    destination: str,
    *,
    weights: str = "auto",
    head: str = "auto",
    progress: Callable[[str], None] = lambda line: None,
) -> Converted:
    """Write `destination`. progress hears one line per layer. ModelFileError when the source cannot
    be read, the destination exists or cannot be written; then nothing is left behind."""
    if source_path.startswith(PREFIX):
        fail(quote(source_path), "a model without data cannot be converted.")
    if os.path.lexists(destination):
        fail(quote_path(destination), "the destination exists already; it is not overwritten.")
    source = open_source(source_path)
    try:
        read_texts(source)
        plan = policy.plan(source, weights, head)
        with _new_file(destination) as file:
            size = _write(file, source, plan, progress)
    finally:
        source.close()
    notes = (*source.notes, *plan.notes)
    return Converted(destination, size, plan.weights, plan.head, notes)


class _new_file(contextlib.AbstractContextManager[BinaryIO]):
    """A file that appears under its name, verified and complete, or not at all."""

    def __init__(self, destination: str) -> None:
        self.destination = destination

    def __enter__(self) -> BinaryIO:
        folder, name = os.path.split(os.path.abspath(self.destination))
        try:
            handle, self.temporary = tempfile.mkstemp(
                prefix=f".{name}.", suffix=".part", dir=folder
            )
        except OSError as error:
            self._fail(error)
        self.file = os.fdopen(handle, "wb")
        return self.file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self._publish()
            else:
                with contextlib.suppress(OSError):
                    self.file.close()
                if isinstance(error, OSError):
                    self._fail(error)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self.temporary)

    def _publish(self) -> None:
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            wrong = verify(self.temporary)
            if wrong:
                fail(
                    quote_path(self.destination),
                    f"what was written reads back differently: {', '.join(wrong[:3])}.",
                )
            os.chmod(self.temporary, 0o644)
            _link(self.temporary, self.destination)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        raise ModelFileError(
            f"cannot write {quote_path(self.destination)}: {error.strerror}."
        ) from error


def _link(temporary: str, destination: str) -> None:
    """Give the file its name; FileExistsError when something took that name meanwhile."""
    try:
        os.link(temporary, destination)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if os.path.lexists(destination):
            raise FileExistsError(17, "File exists", destination) from None
        os.rename(temporary, destination)


def _write(
    file: BinaryIO, source: Source, plan: policy.Plan, progress: Callable[[str], None]
) -> int:
    items = []
    for planned in plan.tensors:
        stored = Stored(planned.encoding, planned.rows, planned.cols)
        items.append(_Item(planned, stored, parts_of(planned.name, stored)))
    digests: dict[str, str] = {}
    header = _header(source, plan, items, digests)
    file.write(header)
    writer = _Writer(file)
    for name, data in _text_files(source):
        digests[name] = writer.put([data])
    group, count, written = "", 0, 0
    for item in items:
        found = _group_of(item.planned.name)
        if found != group and count:
            progress(f"{group}: {count} tensors, {written} bytes")
            count = written = 0
        group = found
        arg = reencode(
            source.read(item.planned.origin),
            item.planned.name,
            item.planned.encoding,
            quote_path(source.where),
        )
        buffers = _buffers(arg)
        digests[arg.name] = writer.put(buffers)
        source.release()
        count += 1
        written += sum(memoryview(buffer).nbytes for buffer in buffers)
    progress(f"{group}: {count} tensors, {written} bytes")
    size = file.tell()
    final = _header(source, plan, items, digests)
    assert len(final) == len(header), "checksums have one length"
    file.seek(0)
    file.write(final)
    return size


class _Writer:
    """Appends buffers, each followed by the padding that the header promised."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def put(self, buffers: list[Any]) -> str:
        """Write the parts of one tensor; returns their SHA-256."""
        digest = hashlib.sha256()
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            digest.update(view)
            self.file.write(view)
            self.file.write(bytes(-view.nbytes % ALIGN_BYTES))
        return digest.hexdigest()


def _buffers(arg: TensorArg) -> list[Any]:
    return [buffer for buffer in (arg.data, arg.scales, arg.globals_) if buffer is not None]


def _text_files(source: Source) -> list[tuple[str, bytes]]:
    return [(name, source.files[name]) for name in TEXT_FILES if name in source.files]


def _group_of(name: str) -> str:
    """What a progress line reports together: `layer N`, `mtp`, or the tensor itself."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"layer {parts[2]}"
    return "mtp" if parts[0] == "mtp" else name.removesuffix(".weight")


def _header(
    source: Source, plan: policy.Plan, items: list[_Item], digests: dict[str, str]
) -> bytes:
    """The length field and the JSON text, padded so that the data starts aligned."""
    texts = _text_files(source)
    table = {
        "version": VERSION,
        "weights": plan.weights,
        "head": plan.head,
        "tensors": {
            item.planned.name: {
                "encoding": ENCODING_NAMES[item.planned.encoding],
                "shape": list(logical_shape(item.stored)),
                "block": BLOCKS[item.planned.encoding],
                "sha256": digests.get(item.planned.name, _NO_DIGEST),
            }
            for item in items
        },
        "files": {name: {"sha256": digests.get(name, _NO_DIGEST)} for name, _ in texts},
    }
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "ksl": _json(table)}}
    parts = [Part(f"file/{name}", "U8", (len(data),), len(data)) for name, data in texts]
    parts += [part for item in items for part in item.parts]
    position = 0
    for index, part in enumerate(parts):
        header[part.name] = _entry(part.dtype, part.shape, position, part.size)
        position += part.size
        gap = -position % ALIGN_BYTES
        if gap:
            header[f"pad/{index}"] = _entry("U8", (gap,), position, gap)
            position += gap
    text = _json(header).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def _entry(dtype: str, shape: tuple[int, ...], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
