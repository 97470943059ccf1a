"""Where the server stands: one mutable value, owned by app.py, read by handlers and health
checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kslserve.errors import Unavailable

if TYPE_CHECKING:
    from kslserve.service.service import Service


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


_MESSAGES = {
    Phase.LOADING: ("The server is loading its model.", 2),
    Phase.DRAINING: ("The server is shutting down.", 5),
    Phase.FAILED: ("The engine has failed; the server is going down.", 5),
}


@dataclass(slots=True)
class ServerState:
    """service is None until the model is loaded. stalled: waves have stopped to progress."""

    phase: Phase = Phase.LOADING
    service: Service | None = None
    stalled: bool = False

    @property
    def ready(self) -> bool:
        return self.phase is Phase.READY and not self.stalled

    def unavailable(self) -> Unavailable:
        """The error of a request that cannot be served in this phase."""
        message, seconds = _MESSAGES.get(self.phase, ("The engine makes no progress.", 5))
        return Unavailable(message, retry_after_s=seconds)

    def require(self) -> Service:
        """The service, or Unavailable while loading, draining or failed."""
        if self.phase is not Phase.READY or self.service is None:
            raise self.unavailable()
        return self.service
