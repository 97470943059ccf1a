"""Tensors in other encodings, through the native codecs: stripes of rows, on all cores.

A stripe is a multiple of 128 rows (the height of scale blocks), so the result depends on neither
its size nor the number of workers. Workers are threads: reading, decoding and encoding a stripe
all happen without the interpreter lock.
"""

from __future__ import annotations

import hashlib
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

CHUNK_ELEMENTS = 1 << 19  # float32 values that a worker holds at once: 2 MiB, which caches hold
WORKERS_MAX = 32  # bounds the memory of all stripes in work
SAMPLE_BYTES = 4096  # of each end of a stripe's buffers, for its digest

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
        return finish(encoded(source, item, begin, end))

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


class Rows:
    """A planned tensor's `read`: in stripes that workers read and encode ahead. started: hears the
    first request."""

    def __init__(
        self, source: Source, item: Planned, started: Callable[[], None] = lambda: None
    ) -> None:
        self._source, self._item, self._started = source, item, started
        self._stripes: Iterator[Stripe] = iter(())
        self._left: Stripe | None = None
        self._next = 0
        self._digest = hashlib.sha256()

    def __call__(self, begin: int, end: int) -> Iterator[Parts]:
        if begin == 0:
            self._started()
            self._digest = hashlib.sha256()
            self._stripes, self._left = self._all(), None
        elif begin != self._next:
            raise ValueError(f"row {begin} was asked for after row {self._next}")
        self._next = end
        while begin < end:
            stripe = self._left or self._taken(next(self._stripes))
            stop = min(end, stripe.end)
            self._left = stripe if stop < stripe.end else None
            yield _between(stripe, begin, stop)
            begin = stop

    def digest(self) -> bytes:
        return self._digest.digest()

    def _all(self) -> Iterator[Stripe]:
        item = self._item
        if item.rows > stripe_rows(item.cols):
            return stripes(self._source, [item])
        return iter([encoded(self._source, item, 0, item.rows)])

    def _taken(self, stripe: Stripe) -> Stripe:
        for part in stripe.parts:
            if part is not None:
                self._digest.update(part[:SAMPLE_BYTES].data)
                self._digest.update(part[-SAMPLE_BYTES:].data)
        return stripe


def _between(stripe: Stripe, begin: int, end: int) -> Parts:
    """Rows [begin, end) of a stripe."""
    item = stripe.item
    if (begin, end) == (stripe.begin, stripe.end):
        return stripe.parts
    low, high = begin - stripe.begin, end - stripe.begin
    lows = encoding_sizes(item.encoding, low, item.cols) if low else (0, 0, 0)
    highs = encoding_sizes(item.encoding, high, item.cols)
    codes, scales, globals_ = (
        None if part is None else part[at:to]
        for part, at, to in zip(stripe.parts, lows, highs, strict=True)
    )
    assert codes is not None
    return codes, scales, globals_


def encoded(source: Source, item: Planned, begin: int, end: int) -> Stripe:
    """One stripe. ModelFileError for a value that is not finite or data that cannot be read."""
    piece = source.rows(item.origin, begin, end)
    return Stripe(item, begin, end, encode_piece(piece, item.encoding, begin, source))


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
