"""Identity of computed state: two engines with equal fingerprints make equal bits from equal
tokens.

Saved state is keyed by it, so that a file from another model, format or build is never loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import astuple

from kslserve.engine.model import ModelSpec, TensorArg
from kslserve.engine.types import EngineInfo

WHOLE_BYTES = 1 << 16  # buffers up to this size are hashed whole
PIECES = 16
PIECE_BYTES = 4096


def fingerprint(spec: ModelSpec, tensors: Iterable[TensorArg], info: EngineInfo) -> str:
    """SHA-256 (hex) over dimensions, tensors in order of their names, KV format, block size and
    numerics. Of a large buffer only its size and evenly spaced pieces count; a tensor that is read
    says itself what it holds, once it was read."""
    digest = hashlib.sha256()
    facts = (astuple(spec), info.kv_format, info.block_tokens, info.activation, info.numerics)
    digest.update(repr(facts).encode())
    for tensor in sorted(tensors, key=lambda t: t.name):
        shape = (tensor.name, tensor.encoding, tensor.rows, tensor.cols, tensor.fill)
        digest.update(repr(shape).encode())
        if tensor.read is not None:
            digest.update(tensor.read.digest())
            continue
        for buffer in (tensor.data, tensor.scales, tensor.globals_):
            _update(digest, buffer)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, buffer: object) -> None:
    if buffer is None:
        digest.update(b"-")
        return
    view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
    digest.update(b"%d:" % len(view))
    if len(view) <= WHOLE_BYTES:
        digest.update(view)
        return
    last = len(view) - PIECE_BYTES
    for piece in range(PIECES):
        start = last * piece // (PIECES - 1)
        digest.update(view[start : start + PIECE_BYTES])
