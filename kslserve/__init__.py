"""kslserve: a local LLM server for agentic coding clients.

Importing it checks that the native module `_kslserve` is there and was built from these sources.
"""

from __future__ import annotations

from pathlib import Path

from kslserve.engine import abi

__version__ = "0.12.0"


def _check_native() -> None:
    """Raise ImportError with one sentence when the native module is missing or stale."""
    try:
        from _kslserve import ffi, lib
    except ImportError as error:
        # A module that is there and cannot be loaded says why; only a missing one is a missing
        # install.
        if not isinstance(error, ModuleNotFoundError):
            raise
        raise ImportError("not installed: run `pip install .`") from None
    digest = abi.source_digest(Path(__file__).resolve().parents[1])
    try:
        version = ffi.string(lib.ksl_version()).decode()
        header = ffi.string(lib.ksl_abi_hash()).decode()
        built_from = ffi.string(lib.ksl_source_digest()).decode()
    except AttributeError:  # a module from before one of these functions
        version = header = built_from = ""
    if (version, header) != (__version__, abi.ABI_HASH) or digest not in (None, built_from):
        raise ImportError("reinstall: native module is older than the sources")


_check_native()
