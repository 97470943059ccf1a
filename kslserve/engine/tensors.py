"""The tensors that an engine is opened with, as C structs: buffers in place, fills, and weights
that native code asks for, piece by piece, while it opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _kslserve import ffi, lib

from kslserve.engine.codecs import encoding_sizes
from kslserve.engine.model import RowReader, TensorArg

REFUSED = 1  # anything but 0 lets ksl_open fail


class TensorTable:
    """structs: ksl_tensor[]. It must live until ksl_open returns."""

    def __init__(self, tensors: Sequence[TensorArg]) -> None:
        self.structs = ffi.new("ksl_tensor[]", max(len(tensors), 1))
        self._keep: list[Any] = []
        self._readings: list[_Reading] = []
        for entry, tensor in zip(self.structs, tensors, strict=False):
            self._fill(entry, tensor)

    def raise_read_error(self) -> None:
        """Raise what a `read` raised during ksl_open, if one did."""
        for reading in self._readings:
            if reading.error is not None:
                raise reading.error

    def _fill(self, entry: Any, tensor: TensorArg) -> None:
        name = ffi.new("char[]", tensor.name.encode())
        self._keep.append(name)
        entry.name = name
        entry.encoding = tensor.encoding
        entry.rows, entry.cols = tensor.rows, tensor.cols
        for field, size, kind, buffer in (
            ("data", "data_bytes", "void *", tensor.data),
            ("scales", "scales_bytes", "void *", tensor.scales),
            ("globals", "globals_bytes", "float *", tensor.globals_),
        ):
            if buffer is not None:
                view = ffi.from_buffer(buffer)
                self._keep.append(view)
                setattr(entry, field, ffi.cast(kind, view))
                setattr(entry, size, ffi.sizeof(view))
        if tensor.fill is not None:
            entry.fill_kind = tensor.fill.kind
            entry.fill_seed = tensor.fill.seed
            entry.fill_scale = tensor.fill.scale
        if tensor.read is not None:
            reading = _Reading(tensor, tensor.read)
            self._readings.append(reading)
            entry.read = lib.ksl_python_read
            entry.context = reading.handle


class _Reading:
    """One tensor with a `read`. error: what that raised."""

    def __init__(self, tensor: TensorArg, read: RowReader) -> None:
        self._tensor, self._read = tensor, read
        self.handle = ffi.new_handle(self)
        self.error: BaseException | None = None

    def into(self, begin: int, rows: int, targets: tuple[Any, Any, Any]) -> int:
        """Fill native buffers with rows [begin, begin + rows); KSL_OK or another code."""
        tensor = self._tensor
        try:
            sizes = encoding_sizes(tensor.encoding, rows, tensor.cols)
            filled = [0, 0, 0]
            for parts in self._read(begin, begin + rows):
                for index, part in enumerate(parts):
                    if part is None:
                        continue
                    view = memoryview(part).cast("B")
                    at = filled[index]
                    filled[index] = at + view.nbytes
                    assert filled[index] <= sizes[index], "the pieces are what was asked for"
                    ffi.memmove(ffi.cast("char *", targets[index]) + at, view, view.nbytes)
            assert tuple(filled) == sizes, "the pieces are all rows that were asked for"
        except BaseException as error:
            self.error = error
            return REFUSED
        return int(lib.KSL_OK)


@ffi.def_extern(name="ksl_python_read", error=REFUSED)
def _python_read(context: Any, row: int, rows: int, data: Any, scales: Any, globals_: Any) -> int:
    reading: _Reading = ffi.from_handle(context)
    return reading.into(row, rows, (data, scales, globals_))
