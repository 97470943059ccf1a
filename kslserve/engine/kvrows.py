"""Rows of the KV cache as arrays, through the native encoder and decoder (native/common/kv_row.h
defines every format)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kslserve.engine.budget import KV_FORMATS, kv_row_bytes
from kslserve.errors import EngineError

KV_KEY, KV_VALUE = 0, 1

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]


def kv_encode(kv: str, side: int, array: F32) -> tuple[U8, U8]:
    """The rows of K (KV_KEY, not yet rotated) or V (KV_VALUE), float32 [rows, head_dim], as the
    engine stores them: codes uint8 [rows, bytes] and scales uint8 [rows, bytes]. EngineError with
    the native text for heads that the format does not take."""
    source = np.ascontiguousarray(array, dtype=np.float32)
    rows, dim = source.shape
    codes, scales = (np.empty((rows, n), np.uint8) for n in kv_row_bytes(dim, kv, side))
    ffi, lib = _native()
    error = ffi.new("ksl_error *")
    code = lib.ksl_kv_encode(
        KV_FORMATS.index(kv), side, ffi.from_buffer("float[]", source), rows, dim,
        ffi.from_buffer(codes), ffi.from_buffer(scales), error,
    )  # fmt: skip
    _check(ffi, lib, code, error)
    return codes, scales


def kv_decode(kv: str, side: int, codes: U8, scales: U8, dim: int) -> F32:
    """The float32 [rows, dim] values of such rows; those of a rotated K stay rotated. EngineError
    for arrays of another size than `kv_encode` makes."""
    rows = len(codes)
    sizes = kv_row_bytes(dim, kv, side)
    if codes.shape != (rows, sizes[0]) or scales.shape != (rows, sizes[1]):
        raise EngineError(
            f"Rows of {dim} dimensions in {kv} take {sizes[0]} and {sizes[1]} bytes, not "
            f"{codes.shape} and {scales.shape}."
        )
    values = np.empty((rows, dim), np.float32)
    ffi, lib = _native()
    error = ffi.new("ksl_error *")
    code = lib.ksl_kv_decode(
        KV_FORMATS.index(kv), side, ffi.from_buffer(np.ascontiguousarray(codes)),
        ffi.from_buffer(np.ascontiguousarray(scales)), rows, dim,
        ffi.from_buffer("float[]", values, require_writable=True), error,
    )  # fmt: skip
    _check(ffi, lib, code, error)
    return values


def _check(ffi: Any, lib: Any, code: int, error: Any) -> None:
    if code != lib.KSL_OK:
        raise EngineError(ffi.string(error.text).decode(errors="replace"))


def _native() -> tuple[Any, Any]:
    # The formats stay usable where the extension is not built.
    from _kslserve import ffi, lib

    return ffi, lib
