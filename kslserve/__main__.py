"""`python -m kslserve [command] ...`; no command means serve."""

from __future__ import annotations

import sys

from kslserve.cli import run


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
