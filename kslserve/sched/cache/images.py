"""Host memory for images of slabs and blocks, used again and again.

Images come and go with every turn, some hundred MiB at a time. Were they allocated one by one, each
would be made of fresh pages, which the system clears first, and what the allocator keeps between
them would be anybody's guess. Here an image is a place in a sheet of anonymous memory. Nobody says
when it is free: ops, copies and the disk thread hold the array, or a part of it, and the place
comes back with the last of them, in whatever thread. Pages of free places are kept for the next
image as long as all of them stay within a bound; others go back to the system at once."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque

import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]

LINE = 64  # places begin at multiples of it, and of a page where they have one
SHEET_BYTES, SHEET_PLACES = 32 << 20, 64  # of a sheet, whichever is less, and one place at least


class _Place:
    """What an image's array is based on: numpy asks it for the memory, and keeps it alive."""

    __slots__ = ("__array_interface__", "_at", "_returned")

    def __init__(self, at: _Spot, nbytes: int, returned: deque[_Spot]) -> None:
        self.__array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (at.address, False), "version": 3,
        }  # fmt: skip
        self._at = at
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._at)


class _Spot:
    """Where a place is. warm: it has pages."""

    __slots__ = ("address", "begin", "sheet", "size", "warm")

    def __init__(self, sheet: mmap.mmap, begin: int, size: int, address: int) -> None:
        self.sheet = sheet
        self.begin = begin
        self.size = size
        self.address = address
        self.warm = False


class ImagePool:
    """most: bytes with pages up to which free places keep theirs. All of it may be called in any
    thread."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._returned: deque[_Spot] = deque()  # appended to by __del__, which must not lock
        self._free: dict[int, list[_Spot]] = {}  # by size; those with pages come last
        self._held = 0  # bytes with pages, in use or free

    @property
    def held(self) -> int:
        """Bytes of images in use, and of free places that keep their pages."""
        with self._lock:
            self._collect()
            self._return_pages(self.most)
            return self._held

    def take(self, nbytes: int, count: int = 1) -> list[Image]:
        """Images of a size, of undefined content."""
        size = _place_bytes(nbytes)
        images: list[Image] = []
        with self._lock:
            self._collect()
            free = self._free.setdefault(size, [])
            for _ in range(count):
                if not free:
                    free += _sheet(size)
                spot = free.pop()
                if not spot.warm:
                    spot.warm = True
                    self._held += size
                images.append(np.asarray(_Place(spot, nbytes, self._returned)))
            self._return_pages(self.most)
        return images

    def give_back(self) -> None:
        """Keep no free pages."""
        with self._lock:
            self._collect()
            self._return_pages(0)

    def _collect(self) -> None:
        while self._returned:
            spot = self._returned.popleft()
            self._free[spot.size].append(spot)

    def _return_pages(self, most: int) -> None:
        """Those of free places, while there are more than `most` bytes in all."""
        for size, free in self._free.items():
            if size % mmap.PAGESIZE:
                continue
            for spot in free:
                if self._held <= most:
                    return
                if spot.warm:
                    spot.sheet.madvise(mmap.MADV_DONTNEED, spot.begin, size)
                    spot.warm = False
                    self._held -= size


def _place_bytes(nbytes: int) -> int:
    unit = mmap.PAGESIZE if nbytes >= mmap.PAGESIZE else LINE
    return max(1, -(-nbytes // unit)) * unit


def _sheet(size: int) -> list[_Spot]:
    """New places, the first one last, so that images taken together are neighbours."""
    count = max(1, min(SHEET_PLACES, SHEET_BYTES // size))
    sheet = mmap.mmap(-1, count * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if len(sheet) >= SHEET_BYTES // 2:
        with contextlib.suppress(OSError):  # a kernel without them
            sheet.madvise(mmap.MADV_HUGEPAGE)
    address = np.frombuffer(sheet, np.uint8).ctypes.data
    return [_Spot(sheet, at * size, size, address + at * size) for at in reversed(range(count))]
