"""Checkpoint: the state of a token sequence at one position, and where copies of it are.

On the device it is a slab of its own and references to the KV blocks of all its positions. The
last block may be partial, and the sequence that wrote it may go on writing behind the checkpoint's
position: a block only ever grows, so what the checkpoint needs of it does not change. Who adopts
the checkpoint copies that block and shares the full ones.

Any position can be adopted whose tokens are all computed. The last token of a generation, a stop id
included, is sampled and never computed, so the end of a generation is one token before it: the next
turn computes that token and what is new.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kslserve.sched.cache.diskstore import DiskCopy
    from kslserve.sched.cache.hosttier import HostCopy
    from kslserve.sched.cache.index import Node


class Kind(enum.Enum):
    """Why it was saved, most valuable save points first."""

    JUNCTION = "junction"  # two known paths part here
    STABLE = "stable"  # before the generation header
    SYSTEM = "system"  # end of the system and tools block, or another boundary before the last
    PROMPT = "prompt"  # one token before the end of a prompt without boundaries
    INTERVAL = "interval"  # inside a long prompt
    GENERATION = "generation"  # where a sequence ended, in prompt or output


@dataclass(slots=True)
class DeviceCopy:
    """blocks: of all positions, in order; the last one may be partial."""

    slab: int
    blocks: list[int]


class Checkpoint:
    """position: tokens that are computed. used: admission count when it was made or adopted last.
    pins: adoptions that no wave has carried yet; it stays on the device until then. moving: it is
    being copied to the host; tried: admission count when that began last."""

    __slots__ = (
        "device", "disk", "hits", "host", "kind", "moving", "node", "pins", "position", "tried",
        "used",
    )  # fmt: skip

    def __init__(self, node: Node, kind: Kind, used: int) -> None:
        self.node = node
        self.kind = kind
        self.position = node.end
        self.used = used
        self.hits = 0
        self.pins = 0
        self.device: DeviceCopy | None = None
        self.host: HostCopy | None = None
        self.disk: DiskCopy | None = None
        self.moving = False
        self.tried = -1

    @property
    def stored(self) -> bool:
        """Some copy exists, or is being made."""
        return self.moving or not (self.device is None and self.host is None and self.disk is None)
