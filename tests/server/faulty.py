"""`python -m tests.server.faulty TRIGGER FLAGS...`: the server, whose engine fails once there is a
file named TRIGGER. Needs --test-hooks."""

from __future__ import annotations

import sys
from pathlib import Path

from kslserve.cli import run
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import OpKind, StateOp, Wave


def install(trigger: Path) -> None:
    submit = NativeEngine.submit

    def faulty(self: NativeEngine, wave: Wave) -> bool:
        if trigger.exists():
            wave.before = [*wave.before, StateOp(OpKind.FAULT, 0)]
        return submit(self, wave)

    NativeEngine.submit = faulty  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    sys.exit(run(sys.argv[2:]))
