"""Memory of the C library's heap, which it keeps when it is freed."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Give what is free back to the system. Takes a moment for each GiB, in which other threads may
    wait for memory."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if give_back is not None:
        give_back(0)
