"""One safetensors file, with every offset checked before anything is read.

Layout: a little-endian u64 header length N, N bytes of JSON (`name: {dtype, shape, data_offsets}`
and `__metadata__`: text to text), then the tensors' bytes without holes. Opening reads the header
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kslserve.ksl.files import Bytes, RegularFile, fail, parse_object, quote

HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
RANK_LIMIT = 8

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


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
    empty. expected_size: bytes that the header promises; actual_size: bytes that there are."""

    __slots__ = ("_file", "actual_size", "entries", "expected_size", "metadata", "origin", "path")

    def __init__(self, path: str, *, whole: bool = True) -> None:
        """Open the file and check its header. whole: also that the file ends where the header says.
        ModelFileError for anything but a valid file."""
        self.path = path
        self._file = RegularFile(path)
        self.actual_size = self._file.size
        try:
            if self._file.size < 8:
                fail(
                    self._file.where,
                    f"expected a safetensors file, found {self._file.size} bytes: too short for "
                    "one.",
                )
            self._read_header(whole)
        except BaseException:
            self.close()
            raise

    def _read_header(self, whole: bool) -> None:
        where = self._file.where
        length = int.from_bytes(self._file.read(0, 8).tobytes(), "little")
        if length > HEADER_LIMIT_BYTES:
            fail(
                where,
                f"expected a header length of at most {HEADER_LIMIT_BYTES} at byte 0, found "
                f"{length}: not a safetensors file.",
            )
        origin = self.origin = 8 + length
        size = self.actual_size
        if origin > size:
            fail(where, f"the header should end at byte {origin}, but the file has {size} bytes.")
        header = parse_object(self._file.read(8, length).tobytes(), f"{where}: header at byte 8")
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            fail(where, "`__metadata__` of the header should map text to text.")
        limit = size if whole else 1 << 63
        entries = [_read_entry(name, item, origin, limit, where) for name, item in header.items()]
        entries.sort(key=lambda entry: (entry.start, entry.end))
        position = origin
        for entry in entries:
            if entry.start != position:
                kind = "overlaps the one before" if entry.start < position else "leaves a hole"
                fail(
                    where,
                    f"tensor {quote(entry.name)} {kind}: expected its start at byte {position}, "
                    f"found byte {entry.start}.",
                )
            position = entry.end
        if whole and position != size:
            fail(where, f"expected the file to end at byte {position}, found {size} bytes.")
        self.entries = {entry.name: entry for entry in entries}
        self.metadata: dict[str, str] = metadata
        self.expected_size = position

    def part(self, name: str, begin: int, end: int) -> Bytes:
        """A copy of bytes [begin, end) of a tensor. KeyError for an unknown name, ModelFileError
        when the file has become shorter. For any thread."""
        entry = self.entries[name]
        assert 0 <= begin <= end <= entry.end - entry.start, "a part lies in its tensor"
        return self._file.read(entry.start + begin, end - begin)

    def data(self, name: str) -> Bytes:
        """A copy of all bytes of a tensor."""
        entry = self.entries[name]
        return self._file.read(entry.start, entry.end - entry.start)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


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
