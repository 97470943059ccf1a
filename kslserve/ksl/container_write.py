"""Writing containers: positions and header from a plan, the data stripe by stripe."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kslserve.engine.codecs import ENCODING_NAMES, encoding_sizes
from kslserve.ksl.container import (
    ALIGN_BYTES,
    BLOCKS,
    FORMAT,
    VERSION,
    Part,
    logical_shape,
    parts_of,
)
from kslserve.ksl.layout import Stored
from kslserve.ksl.model import TEXT_FILES, Source
from kslserve.ksl.policy import Plan, Planned
from kslserve.ksl.quantize import Stripe

_NO_DIGEST = "0" * 64  # holds the place of a checksum until the tensor was written


@dataclass(slots=True)
class _Open:
    """The checksum of the tensor that is being taken in: codes go in as they come, the other parts
    wait for the last of them."""

    digest: Any = field(default_factory=hashlib.sha256)
    scales: list[Any] = field(default_factory=list)
    globals_: list[Any] = field(default_factory=list)


class ContainerWriter:
    """Writes one container. `finish` is for `quantize.stripes`, in any thread; `taken` must see the
    stripes in order. put(position, bytes) writes."""

    def __init__(self, source: Source, plan: Plan, put: Callable[[int, Any], None]) -> None:
        self._plan = plan
        self._put = put
        self._texts = [(n, source.files[n]) for n in TEXT_FILES if n in source.files]
        self._stored = {t.name: Stored(t.encoding, t.rows, t.cols) for t in plan.tensors}
        self._parts = {name: parts_of(name, item) for name, item in self._stored.items()}
        self._digests: dict[str, str] = {}
        self._open = _Open()
        self._starts: dict[str, int] = {}
        self._origin = len(self.header())
        self.size = self._origin + self._data_bytes

    def write_texts(self) -> None:
        for name, data in self._texts:
            self._put(self._origin + self._starts[f"file/{name}"], data)
            self._digests[name] = hashlib.sha256(data).hexdigest()

    def finish(self, stripe: Stripe) -> Stripe:
        item = stripe.item
        lows = encoding_sizes(item.encoding, stripe.begin, item.cols) if stripe.begin else (0, 0, 0)
        for part, data, low in zip(self._parts[item.name], stripe.parts, lows, strict=False):
            if data is not None:
                self._put(self._origin + self._starts[part.name] + low, data)
        return stripe

    def taken(self, stripe: Stripe) -> None:
        """Account for the next stripe in order."""
        codes, scales, globals_ = stripe.parts
        self._open.digest.update(codes)
        if scales is not None:
            self._open.scales.append(scales)
        if globals_ is not None:
            self._open.globals_.append(globals_)
        if stripe.end == stripe.item.rows:
            for data in (*self._open.scales, *self._open.globals_):
                self._open.digest.update(data)
            self._digests[stripe.item.name] = self._open.digest.hexdigest()
            self._open = _Open()

    def header(self) -> bytes:
        """The length field and the JSON text, padded so that the data starts aligned. Its length
        does not depend on what was written."""
        table = {
            "version": VERSION,
            "weights": self._plan.weights,
            "head": self._plan.head,
            "tensors": {item.name: self._entry_of(item) for item in self._plan.tensors},
            "files": {n: {"sha256": self._digests.get(n, _NO_DIGEST)} for n, _ in self._texts},
        }
        header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "ksl": _json(table)}}
        parts = [Part(f"file/{name}", "U8", (len(data),), len(data)) for name, data in self._texts]
        parts += [part for found in self._parts.values() for part in found]
        position = 0
        for index, part in enumerate(parts):
            header[part.name] = _entry(part.dtype, part.shape, position, part.size)
            self._starts[part.name] = position
            position += part.size
            gap = -position % ALIGN_BYTES
            if gap:
                header[f"pad/{index}"] = _entry("U8", (gap,), position, gap)
                position += gap
        self._data_bytes = position
        text = _json(header).encode("ascii")
        text += b" " * (-(8 + len(text)) % ALIGN_BYTES)
        return len(text).to_bytes(8, "little") + text

    def _entry_of(self, item: Planned) -> dict[str, Any]:
        return {
            "encoding": ENCODING_NAMES[item.encoding],
            "shape": list(logical_shape(self._stored[item.name])),
            "block": BLOCKS[item.encoding],
            "sha256": self._digests.get(item.name, _NO_DIGEST),
        }


def _entry(dtype: str, shape: tuple[int, ...], start: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
