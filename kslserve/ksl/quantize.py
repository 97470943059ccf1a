"""One tensor in another encoding, through the native codecs, a few megabytes at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kslserve.engine import codecs
from kslserve.engine.codecs import SCALE_BLOCK, encoding_sizes
from kslserve.engine.model import TensorArg
from kslserve.errors import EngineError
from kslserve.ksl.files import fail

CHUNK_ELEMENTS = 4 << 20  # float32 values held at once


def reencode(arg: TensorArg, name: str, encoding: int, where: str) -> TensorArg:
    """`arg` as `name` in `encoding`; unchanged buffers when it has that encoding already. A tensor
    that the engine fills itself only changes its encoding.

    Rows are taken in multiples of the scale block, so the result does not depend on the chunk size.
    ModelFileError for a value that is not finite or a shape that the encoding cannot hold.
    """
    if arg.encoding == encoding or arg.fill is not None:
        return dataclasses.replace(arg, name=name, encoding=encoding)
    rows, cols = arg.rows, arg.cols
    try:
        buffers = [_empty(size) for size in encoding_sizes(encoding, rows, cols)]
        step = max(CHUNK_ELEMENTS // cols // SCALE_BLOCK, 1) * SCALE_BLOCK
        filled = [0, 0, 0]
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            values = decode_rows(arg, begin, end)
            if not np.isfinite(values).all():
                row = begin + int(np.argmin(np.isfinite(values).all(axis=1)))
                fail(
                    where, f"tensor {arg.name}: expected finite values, found another in row {row}."
                )
            encoded = codecs.encode(encoding, values)
            pieces = (encoded.codes, encoded.scales, encoded.globals)
            for index, piece in enumerate(pieces):
                if piece is not None:
                    flat = piece.reshape(-1).view(np.uint8)
                    buffers[index][filled[index] : filled[index] + flat.size] = flat
                    filled[index] += flat.size
    except EngineError as error:
        fail(where, f"tensor {arg.name}: {error.message}")
    data, scales, globals_ = (buffer if buffer.size else None for buffer in buffers)
    return TensorArg(name, encoding, rows, cols, data, scales, globals_)


def decode_rows(arg: TensorArg, begin: int, end: int) -> codecs.F32:
    """Rows [begin, end) as float32 [end - begin, cols]. begin: a multiple of 128."""
    whole = encoding_sizes(arg.encoding, arg.rows, arg.cols)
    ahead = encoding_sizes(arg.encoding, begin, arg.cols) if begin else (0, 0, 0)
    part = encoding_sizes(arg.encoding, end - begin, arg.cols)
    pieces: list[Any] = []
    for buffer, total, start, size in zip(
        (arg.data, arg.scales, arg.globals_), whole, ahead, part, strict=True
    ):
        flat = None if not total else np.frombuffer(buffer, np.uint8)
        pieces.append(None if flat is None else flat[start : start + size])
    codes, scales, globals_ = pieces
    return codecs.decode(arg.encoding, codes, scales, globals_, end - begin, arg.cols)


def _empty(size: int) -> codecs.U8:
    return np.empty(size, np.uint8)
