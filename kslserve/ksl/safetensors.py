"""One safetensors file, by memory map, with every offset checked before anything is read.

Layout: a little-endian u64 header length N, N bytes of JSON (`name: {dtype, shape, data_offsets}`
and `__metadata__`: text to text), then the tensors' bytes without holes. Opening reads the header
only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kslserve.ksl.files import fail, open_regular, parse_object, quote, quote_path

HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
RANK_LIMIT = 8

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: its bytes are [start, end) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsFile:
    """An open file. entries: by name, in the order of their bytes. metadata: `__metadata__` or
    empty.

    Views made by `data` keep the memory map alive after `close`.
    """

    __slots__ = ("_map", "entries", "metadata", "path")

    def __init__(self, path: str) -> None:
        """Map the file and check its header. ModelFileError for anything but a whole, valid
        file."""
        self.path = path
        where = quote_path(path)
        handle, size = open_regular(path)
        try:
            if size < 8:
                fail(where, f"expected a safetensors file, found {size} bytes: too short for one.")
            try:
                self._map: mmap.mmap | None = mmap.mmap(handle, size, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                fail(where, f"cannot be mapped into memory: {error}.")
        finally:
            os.close(handle)
        try:
            self.entries, self.metadata = _read_header(self._map, size, where)
        except BaseException:
            self.close()
            raise

    def data(self, name: str) -> Bytes:
        """The bytes of a tensor: uint8 [end - start], read-only, not copied. KeyError for an
        unknown name."""
        entry = self.entries[name]
        assert self._map is not None, "the file is closed"
        return np.frombuffer(self._map, np.uint8, entry.end - entry.start, entry.start)

    def release(self) -> None:
        """Give the pages read so far back to the system; reading them again reads the file
        again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Drop the memory map. Idempotent."""
        if self._map is not None:
            with contextlib.suppress(BufferError):  # views remain: it goes with the last of them
                self._map.close()
            self._map = None


def _read_header(
    mapped: mmap.mmap, size: int, where: str
) -> tuple[dict[str, Entry], dict[str, str]]:
    length = int.from_bytes(mapped[:8], "little")
    if length > HEADER_LIMIT_BYTES:
        fail(
            where,
            f"expected a header length of at most {HEADER_LIMIT_BYTES} at byte 0, found {length}: "
            "not a safetensors file.",
        )
    origin = 8 + length
    if origin > size:
        fail(where, f"the header should end at byte {origin}, but the file has {size} bytes.")
    header = parse_object(mapped[8:origin], f"{where}: header at byte 8")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        fail(where, "`__metadata__` of the header should map text to text.")
    entries = [_read_entry(name, item, origin, size, where) for name, item in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = origin
    for entry in entries:
        if entry.start != position:
            kind = "overlaps the one before" if entry.start < position else "leaves a hole"
            fail(
                where,
                f"tensor {quote(entry.name)} {kind}: expected its start at byte {position}, found "
                f"byte {entry.start}.",
            )
        position = entry.end
    if position != size:
        fail(where, f"expected the file to end at byte {position}, found {size} bytes.")
    return {entry.name: entry for entry in entries}, metadata


def _read_entry(name: str, item: Any, origin: int, size: int, where: str) -> Entry:
    label = f"{where}: tensor {quote(name)}"
    if not isinstance(item, dict) or item.keys() != {"dtype", "shape", "data_offsets"}:
        fail(label, "expected dtype, shape and data_offsets in the header.")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        fail(label, f"the dtype {quote(dtype)} is unknown.")
    if not _counts(shape) or len(shape) > RANK_LIMIT:
        fail(
            label, f"expected a list of at most {RANK_LIMIT} sizes as shape, found {quote(shape)}."
        )
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        fail(label, f"expected data_offsets [begin, end], found {quote(offsets)}.")
    start, end = origin + offsets[0], origin + offsets[1]
    if end > size:
        fail(label, f"its data should end at byte {end}, but the file has {size} bytes.")
    expected = ITEM_BYTES[dtype]
    for count in shape:
        expected *= count
    if end - start != expected:
        fail(
            label,
            f"expected {quote(expected)} bytes for {dtype} {quote(shape)} at byte {start}, found "
            f"{end - start}.",
        )
    return Entry(name, dtype, tuple(shape), start, end)


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 62 for v in value)
