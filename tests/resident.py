"""Memory of this process."""

from __future__ import annotations


def resident() -> int:
    """Bytes that only this process has, and that are in memory."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))
