"""Growing arrays whose address native code gets: made once, reused for every wave."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class StructBuffer:
    """A growing array of fixed-size C structs."""

    __slots__ = ("_ffi", "address", "memory", "size")

    def __init__(self, ffi: Any, size: int, count: int) -> None:
        self._ffi = ffi
        self.size = size
        self.memory = bytearray()
        self.address = 0
        self.fit(count)

    def fit(self, count: int) -> bytearray:
        """Room for `count` structs; contents and address hold until the next call."""
        if len(self.memory) < count * self.size:
            self.memory = bytearray(max(2 * len(self.memory), count * self.size))
            self.address = int(self._ffi.cast("uintptr_t", self._ffi.from_buffer(self.memory)))
        return self.memory


class IdBuffer:
    """A growing array of int32."""

    __slots__ = ("address", "values", "view")

    def __init__(self, count: int) -> None:
        self.values: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self.view = self.values.data  # cheaper for single items
        self.address = 0
        self.fit(count)

    def fit(self, count: int) -> npt.NDArray[np.int32]:
        """Room for `count` ids; contents and address hold until the next call."""
        if len(self.values) < count:
            self.values = np.empty(2 * count, dtype=np.int32)
            self.view = self.values.data
            self.address = self.values.ctypes.data
        return self.values
