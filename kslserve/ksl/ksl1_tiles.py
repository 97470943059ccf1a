"""The order of codes in KSL1 payloads against row-major order.

A tile is 16 rows by 32 columns; tiles lie row of tiles by row of tiles. In a tile, lane 4 g + s
holds rows 2 g and 2 g + 1 of columns 8 s to 8 s + 7, in the order [column half][row][4 columns].
Four codes of one row are whole bytes in every encoding (3 for E2M3, 4 for FP8), so reordering moves
such units within each row of tiles.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kslserve.engine.codecs import U8, reorder
from kslserve.ksl.ksl1_header import (
    FLAG_E2M3,
    FLAG_ROW_MAJOR,
    FLAG_WORD_MAJOR,
    TILE_COLS,
    TILE_ROWS,
)

_UNIT_COLS = 4
_PAIRS, _LANES_A_ROW, _HALVES, _ROWS_A_LANE = 8, 4, 2, 2


def from_tiles(payload: U8, flags: int, rows: int, cols: int) -> U8:
    """A payload of whole rows of tiles as row-major codes: uint8 [rows * bytes of a row]. flags:
    the layout bits of the file."""
    if flags & FLAG_ROW_MAJOR:
        return payload
    assert rows % TILE_ROWS == 0, "whole rows of tiles"
    return reorder(_inverse(cols, bool(flags & FLAG_WORD_MAJOR)), payload, _unit_bytes(flags))


def to_tiles(codes: U8, flags: int, rows: int, cols: int) -> U8:
    """The inverse of `from_tiles`."""
    if flags & FLAG_ROW_MAJOR:
        return codes
    assert rows % TILE_ROWS == 0, "whole rows of tiles"
    return reorder(_order(cols, bool(flags & FLAG_WORD_MAJOR)), codes, _unit_bytes(flags))


def _unit_bytes(flags: int) -> int:
    return 3 if flags & FLAG_E2M3 else 4


@lru_cache(maxsize=16)
def _inverse(cols: int, word_major: bool) -> npt.NDArray[np.int32]:
    return np.argsort(_order(cols, word_major)).astype(np.int32)


@lru_cache(maxsize=16)  # a model has a handful of widths
def _order(cols: int, word_major: bool) -> npt.NDArray[np.int32]:
    """For each unit of a row of tiles, in file order, its row-major number among those 16 rows."""
    tiles = cols // TILE_COLS
    numbers = np.arange(TILE_ROWS * cols // _UNIT_COLS, dtype=np.int32).reshape(
        _PAIRS, _ROWS_A_LANE, tiles, _LANES_A_ROW, _HALVES
    )
    # a tile is [half][row of pair][pair][lane] word-major, else [pair][lane][half][row of pair]
    order = (2, 4, 1, 0, 3) if word_major else (2, 0, 3, 4, 1)
    return numbers.transpose(order).reshape(-1)
