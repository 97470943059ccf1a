"""Identity of computed state: two engines with equal fingerprints make equal bits from equal
tokens. The MTP head has one of its own, since the state of the trunk does not depend on it.

Saved state is keyed by it, so that a file from another model, format or build is never loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import astuple, replace

from kslserve.engine.model import ModelSpec, TensorArg
from kslserve.engine.types import EngineInfo

WHOLE_BYTES = 1 << 16  # buffers up to this size are hashed whole
PIECES = 16
PIECE_BYTES = 4096
HEAD = "mtp."  # names of the MTP head's tensors begin so


def fingerprint(spec: ModelSpec, tensors: Iterable[TensorArg], info: EngineInfo) -> str:
    """SHA-256 (hex) of the trunk: over its dimensions, tensors in order of their names, KV format,
    block size and numerics. Of a large buffer only its size and evenly spaced pieces count; a
    tensor that is read says itself what it holds, once it was read."""
    digest = hashlib.sha256()
    trunk = astuple(replace(spec, mtp_layers=0))
    facts = (trunk, info.kv_format, info.block_tokens, info.activation, info.numerics)
    digest.update(repr(facts).encode())
    _update_all(digest, (t for t in tensors if not t.name.startswith(HEAD)))
    return digest.hexdigest()


def head_fingerprint(tensors: Iterable[TensorArg]) -> bytes:
    """The same of the MTP head's tensors, 32 bytes; zeros where there are none."""
    head = [t for t in tensors if t.name.startswith(HEAD)]
    if not head:
        return bytes(32)
    digest = hashlib.sha256()
    _update_all(digest, head)
    return digest.digest()


def _update_all(digest: hashlib._Hash, tensors: Iterable[TensorArg]) -> None:
    for tensor in sorted(tensors, key=lambda t: t.name):
        shape = (tensor.name, tensor.encoding, tensor.rows, tensor.cols, tensor.fill)
        digest.update(repr(shape).encode())
        if tensor.read is not None:
            digest.update(tensor.read.digest())
            continue
        for buffer in (tensor.data, tensor.scales, tensor.globals_):
            _update(digest, buffer)


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
