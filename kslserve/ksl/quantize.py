"""Tensors in other encodings, through the native codecs: stripes of rows, on all cores.

A stripe is a multiple of 128 rows (the height of scale blocks), so the result depends on neither
its size nor the number of workers. Workers are threads: reading, decoding and encoding a stripe
all happen without the interpreter lock.
"""

from __future__ import annotations

import dataclasses
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kslserve.engine import codecs
from kslserve.engine.codecs import SCALE_BLOCK, U8, encoding_sizes
from kslserve.engine.model import TensorArg
from kslserve.errors import EngineError
from kslserve.ksl.files import fail, quote_path
from kslserve.ksl.model import Source
from kslserve.ksl.policy import Planned

CHUNK_ELEMENTS = 2 << 20  # float32 values that a worker holds at once
WORKERS_MAX = 32  # bounds the memory of all stripes in work

Parts = tuple[U8, U8 | None, U8 | None]  # flat bytes of codes, scales, globals


@dataclass(frozen=True, slots=True, eq=False)
class Stripe:
    """Rows [begin, end) of one planned tensor, encoded."""

    item: Planned
    begin: int
    end: int
    parts: Parts


Finish = Callable[[Stripe], Stripe]


def worker_count() -> int:
    """Threads to use by default: one per core that this process may use."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return min(cores, WORKERS_MAX)


def stripe_rows(cols: int) -> int:
    return max(CHUNK_ELEMENTS // cols // SCALE_BLOCK, 1) * SCALE_BLOCK


def stripes(
    source: Source,
    items: Sequence[Planned],
    *,
    workers: int = 0,
    finish: Finish = lambda stripe: stripe,
) -> Iterator[Stripe]:
    """All stripes of all items, in order. workers: 0 is one per core. finish: what else to do with
    a stripe in its worker, such as writing it. Memory holds a few stripes per worker.

    ModelFileError for a value that is not finite or data that cannot be read.
    """
    workers = workers or worker_count()
    pending: deque[Future[Stripe]] = deque()

    def work(item: Planned, begin: int, end: int) -> Stripe:
        piece = source.rows(item.origin, begin, end)
        return finish(Stripe(item, begin, end, encode_piece(piece, item.encoding, begin, source)))

    with ThreadPoolExecutor(workers, thread_name_prefix="ksl-codec") as pool:
        try:
            for item in items:
                step = stripe_rows(item.cols)
                for begin in range(0, item.rows, step):
                    end = min(begin + step, item.rows)
                    if len(pending) >= 2 * workers:
                        yield pending.popleft().result()
                    pending.append(pool.submit(work, item, begin, end))
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def collect(source: Source, items: Sequence[Planned], workers: int = 0) -> Iterator[TensorArg]:
    """The items as whole tensors in memory, in order."""
    buffers: list[U8] = []
    filled = [0, 0, 0]
    for stripe in stripes(source, items, workers=workers):
        item = stripe.item
        if stripe.begin == 0:
            sizes = encoding_sizes(item.encoding, item.rows, item.cols)
            buffers, filled = [np.empty(size, np.uint8) for size in sizes], [0, 0, 0]
        for index, part in enumerate(stripe.parts):
            if part is not None:
                at = filled[index]
                buffers[index][at : at + part.size] = part
                filled[index] = at + part.size
        if stripe.end == item.rows:
            data, scales, globals_ = (buffer if buffer.size else None for buffer in buffers)
            yield TensorArg(item.name, item.encoding, item.rows, item.cols, data, scales, globals_)


def planned_view(source: Source, item: Planned) -> TensorArg:
    """A tensor that needs no encoding, in place; one that the engine fills itself only changes its
    encoding."""
    arg = source.view(item.origin)
    assert arg.encoding == item.encoding or arg.fill is not None, "it is planned as it is stored"
    return dataclasses.replace(arg, name=item.name, encoding=item.encoding)


def encode_piece(piece: TensorArg, encoding: int, begin: int, source: Source) -> Parts:
    """Rows from `begin` on of a tensor of `source` in another encoding."""
    if piece.encoding == encoding:
        return _flat(piece.data), _maybe(piece.scales), _maybe(piece.globals_)
    label = f"{quote_path(source.where)}: tensor {piece.name}"
    try:
        values = codecs.decode(
            piece.encoding, piece.data, piece.scales, piece.globals_, piece.rows, piece.cols
        )
        encoded = codecs.encode(encoding, values)
    except EngineError as error:
        finite = np.isfinite(values).all(axis=1)
        if not finite.all():
            row = begin + int(np.argmin(finite))
            fail(label, f"expected finite values, found another in row {row}.")
        fail(label, error.message)
    return _flat(encoded.codes), _maybe(encoded.scales), _maybe(encoded.globals)


def _flat(array: Any) -> U8:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _maybe(array: Any) -> U8 | None:
    return None if array is None else _flat(array)
