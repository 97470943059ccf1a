"""Weight encodings as arrays: sizes, and whole matrices through the native encoder and decoder.

Layouts (native/include/ksl.h): codes are row-major bytes; FP8 and E2M3 have one scale per 128 x 128
elements, NVFP4 one scale per 16 columns and one float32 global per 128 rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kslserve.errors import EngineError

ENC_F32 = 0
ENC_BF16 = 1
ENC_FP8 = 2
ENC_E2M3 = 3
ENC_NVFP4 = 4

ENCODING_NAMES = {
    ENC_F32: "f32",
    ENC_BF16: "bf16",
    ENC_FP8: "fp8",
    ENC_E2M3: "e2m3",
    ENC_NVFP4: "nvfp4",
}

SCALE_BLOCK = 128  # rows and columns that share a scale (FP8, E2M3), rows that share a global
GROUP = 16  # columns that share a scale (NVFP4)

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """codes: uint8 [rows, bytes of a row]. scales: float32 (FP8) or uint8 (E2M3)
    [ceil(rows/128), ceil(cols/128)], uint8 [rows, cols/16] (NVFP4), else None. globals: float32
    [ceil(rows/128)] (NVFP4), else None."""

    codes: U8
    scales: U8 | F32 | None
    globals: F32 | None


def encoding_sizes(encoding: int, rows: int, cols: int) -> tuple[int, int, int]:
    """Bytes of (codes, scales, globals) of a [rows, cols] matrix. EngineError for an unknown
    encoding or a column count that does not fit it."""
    if rows < 1 or cols < 1:
        raise EngineError(f"A tensor of {rows} x {cols} elements cannot be encoded.")
    blocks = -(-rows // SCALE_BLOCK) * -(-cols // SCALE_BLOCK)
    if encoding == ENC_F32:
        return rows * cols * 4, 0, 0
    if encoding == ENC_BF16:
        return rows * cols * 2, 0, 0
    if encoding == ENC_FP8:
        return rows * cols, blocks * 4, 0
    if encoding == ENC_E2M3:
        _require_multiple(encoding, cols, 4)
        return rows * cols // 4 * 3, blocks, 0
    if encoding == ENC_NVFP4:
        _require_multiple(encoding, cols, GROUP)
        return rows * cols // 2, rows * cols // GROUP, -(-rows // SCALE_BLOCK) * 4
    raise EngineError(f"Encoding {encoding} is unknown.")


class Encodable(Protocol):
    """Anything with the shape and encoding of a tensor."""

    @property
    def encoding(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def cols(self) -> int: ...


def encoded_bytes(tensors: Iterable[Encodable]) -> int:
    """Bytes of all of them: what an engine's copy of the weights takes, but for padding."""
    return sum(sum(encoding_sizes(t.encoding, t.rows, t.cols)) for t in tensors)


def encode(encoding: int, array: F32) -> Encoded:
    """Encode a float32 [rows, cols] matrix; other dtypes are converted first. EngineError with the
    native text when the shape does not fit."""
    source = np.ascontiguousarray(array, dtype=np.float32)
    if source.ndim != 2:
        raise EngineError(f"A matrix was expected, not an array of {source.ndim} dimensions.")
    rows, cols = source.shape
    codes, scales, globals_ = _empty(encoding, rows, cols)
    ffi, lib = _native()
    error = ffi.new("ksl_error *")
    code = lib.ksl_encode(
        encoding,
        ffi.from_buffer("float[]", source),
        rows,
        cols,
        _pointer(ffi, "void *", codes),
        _pointer(ffi, "void *", scales),
        _pointer(ffi, "float *", globals_),
        error,
    )
    if code != lib.KSL_OK:
        raise EngineError(ffi.string(error.text).decode(errors="replace"))
    return Encoded(codes, scales, globals_)


def decode(encoding: int, codes: Any, scales: Any, globals_: Any, rows: int, cols: int) -> F32:
    """The float32 [rows, cols] values of an encoded matrix. codes, scales, globals_: buffers of
    exactly the sizes that `encoding_sizes` gives (None where that is 0), else EngineError."""
    sizes = encoding_sizes(encoding, rows, cols)
    for name, buffer, size in zip(
        ("codes", "scales", "globals"), (codes, scales, globals_), sizes, strict=True
    ):
        found = 0 if buffer is None else memoryview(buffer).nbytes
        if found != size:
            raise EngineError(
                f"The {name} of a {rows} x {cols} {ENCODING_NAMES[encoding]} matrix take {size} "
                f"bytes, not {found}."
            )
    ffi, lib = _native()
    values = np.empty((rows, cols), dtype=np.float32)
    error = ffi.new("ksl_error *")
    code = lib.ksl_decode(
        encoding,
        _pointer(ffi, "void *", codes),
        _pointer(ffi, "void *", scales),
        _pointer(ffi, "float *", globals_),
        rows,
        cols,
        ffi.from_buffer("float[]", values, require_writable=True),
        error,
    )
    if code != lib.KSL_OK:
        raise EngineError(ffi.string(error.text).decode(errors="replace"))
    return values


def reorder(order: npt.NDArray[np.int32], data: U8, unit_bytes: int) -> U8:
    """Units of 3 or 4 bytes in another order, without the interpreter lock: within each run of
    len(order) units of `data`, unit i of the result is unit order[i]. uint8 [bytes of data]."""
    runs, rest = divmod(data.size, order.size * unit_bytes)
    if rest:
        raise EngineError(f"{data.size} bytes are no whole runs of {order.size} units.")
    found = np.empty(data.size, np.uint8)
    ffi, lib = _native()
    error = ffi.new("ksl_error *")
    code = lib.ksl_reorder(
        ffi.from_buffer("int32_t[]", order),
        order.size,
        unit_bytes,
        runs,
        ffi.from_buffer(data),
        ffi.from_buffer(found),
        error,
    )
    if code != lib.KSL_OK:
        raise EngineError(ffi.string(error.text).decode(errors="replace"))
    return found


def _require_multiple(encoding: int, cols: int, of: int) -> None:
    if cols % of:
        raise EngineError(
            f"{ENCODING_NAMES[encoding]} needs a multiple of {of} columns, not {cols}."
        )


def _empty(encoding: int, rows: int, cols: int) -> tuple[U8, U8 | F32 | None, F32 | None]:
    code_bytes, scale_bytes, global_bytes = encoding_sizes(encoding, rows, cols)
    codes = np.empty((rows, code_bytes // rows), dtype=np.uint8)
    scales: U8 | F32 | None = None
    if encoding == ENC_NVFP4:
        scales = np.empty((rows, scale_bytes // rows), dtype=np.uint8)
    elif scale_bytes:
        shape = (-(-rows // SCALE_BLOCK), -(-cols // SCALE_BLOCK))
        if encoding == ENC_FP8:
            scales = np.empty(shape, dtype=np.float32)
        else:
            scales = np.empty(shape, dtype=np.uint8)
    globals_ = np.empty(global_bytes // 4, dtype=np.float32) if global_bytes else None
    return codes, scales, globals_


def _pointer(ffi: Any, kind: str, buffer: Any) -> Any:
    """A pointer to a contiguous buffer (which the caller keeps alive), or NULL for None."""
    if buffer is None:
        return ffi.NULL
    return ffi.cast(kind, ffi.from_buffer(buffer))


def _native() -> tuple[Any, Any]:
    # Sizes and names stay usable where the extension is not built.
    from _kslserve import ffi, lib

    return ffi, lib
