"""What the native module must have been built from. Read by `build.py` and at import."""

from __future__ import annotations

import hashlib
from pathlib import Path

# SHA-256 of native/include/ksl.h; `python build.py abi` writes it, the build refuses another one.
ABI_HASH = "532a14fd489b3e0f564104a81dcca21d41629999cee8a40595e152d183431202"


def header_hash(root: Path) -> str:
    """SHA-256 of the public header under a source root."""
    return hashlib.sha256((root / "native/include/ksl.h").read_bytes()).hexdigest()


def source_digest(root: Path) -> str | None:
    """SHA-256 over every native source under `root`, or None where there are none (a wheel)."""
    native = root / "native"
    if not (native / "include/ksl.h").is_file():
        return None
    digest = hashlib.sha256()
    for path in sorted(native.rglob("*")):
        if path.suffix in (".h", ".cc", ".inl") and "tests" not in path.parts:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()
