"""What an engine is opened with: the model's dimensions, its tensors and the sizes of the pools.

Model files make these values; engines read them. Encodings and fill kinds are the numbers of
`kslserve.engine.codecs`; tensor names are the canonical ones of native/include/ksl.h.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

LAYER_KINDS = ("linear", "full")

Parts = tuple[Any, Any, Any]  # buffers of data, scales and globals, or None

FILL_UNIFORM = 1
FILL_CONSTANT = 2


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions of a text tower. layer_kinds: `linear` or `full` for each trunk layer.
    token_limit: ids at or above it are padding rows of the vocabulary. rope_theta and norm_eps are
    plain floats; everything else counts heads, elements or positions."""

    vocab: int
    hidden: int
    intermediate: int
    layer_kinds: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dims: int
    lin_key_heads: int
    lin_value_heads: int
    lin_key_dim: int
    lin_value_dim: int
    conv_taps: int
    mtp_layers: int
    token_limit: int
    rope_theta: float
    norm_eps: float
    max_positions: int

    @property
    def layers(self) -> int:
        return len(self.layer_kinds)


@dataclass(frozen=True, slots=True)
class Fill:
    """A tensor that the engine makes itself: FILL_UNIFORM is scale * (2 u - 1) with u drawn from
    (seed, element), FILL_CONSTANT is scale everywhere."""

    kind: int
    seed: int = 0
    scale: float = 1.0


class RowReader(Protocol):
    """The values of a tensor that are not in memory."""

    def __call__(self, begin: int, end: int) -> Iterable[Parts]:
        """Rows [begin, end) as consecutive pieces, each a matrix of its own. begin and the ends of
        pieces are multiples of 128, or the last row. Asked in ascending order, from row 0 on, by
        one thread at a time. May raise ModelFileError."""

    def digest(self) -> bytes:
        """Equal for equal values, once all rows were read in order."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorArg:
    """One tensor. data, scales, globals_: contiguous buffers in the layout of the encoding
    (`codecs.encoding_sizes` gives their bytes), or None. Vectors have cols = 1; conv1d is
    [channels, taps]. Buffers are read only during open.

    With `fill`, or with `read`, all buffers are None."""

    name: str
    encoding: int
    rows: int
    cols: int
    data: Any = None
    scales: Any = None
    globals_: Any = None
    fill: Fill | None = None
    read: RowReader | None = None


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Counts that are fixed at open. block_tokens: a multiple of 16. blocks_per_slot: length of a
    slot's block table. wave_columns: most columns of a wave. ring_depth: waves in flight. kv_ring:
    positions that int8ring_int4 also keeps in int8, a multiple of 64."""

    slots: int
    slabs: int
    blocks: int
    block_tokens: int
    blocks_per_slot: int
    wave_columns: int
    ring_depth: int = 1
    kv_ring: int = 1024
