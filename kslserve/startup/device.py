"""Which backend serves: the settings that follow from it, its library and its free memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kslserve.config import Settings
from kslserve.engine.budget import KV_OF, kv_problem
from kslserve.engine.model import ModelSpec
from kslserve.errors import UsageError
from kslserve.startup.pools import free_memory_bytes


def place(settings: Settings, spec: ModelSpec) -> Settings:
    """The settings with `device` and `kv` decided. `auto` is the CUDA device where there is one;
    its KV format is q4, or bf16 for heads that q4 does not take. UsageError for a combination that
    cannot work."""
    if settings.engine != "native":
        return settings
    # Imported here: the other engines also work where the extension was not built.
    from kslserve.engine.cuda import device_present

    device = settings.device
    if device == "auto":
        device = "cuda" if device_present() else "cpu"
    kv = settings.kv
    if device == "cuda" and kv == "auto":
        kv = "bf16" if kv_problem(spec, "q4") else "q4"
    problem = kv_problem(spec, kv) if kv != "auto" else None
    if problem is not None:
        raise UsageError(f"--kv {kv}: {problem}")
    if kv not in ("auto", *KV_OF[device]):
        has = ", ".join(KV_OF[device])
        raise UsageError(f"--kv {kv} is not a format of --device {device}, which has {has}.")
    return replace(settings, device=device, kv=kv)


def open_library(settings: Settings) -> Any:
    """The library with the backend of placed settings. EngineError where it is missing."""
    if settings.device == "cuda":
        from kslserve.engine.cuda import load_library

        return load_library()
    from kslserve.engine.native import CPU_LIBRARY

    return CPU_LIBRARY


def free_bytes(settings: Settings) -> int:
    """Memory that weights and pools may take, of the device or of the machine. UsageError where the
    device cannot be used."""
    if settings.engine == "native" and settings.device == "cuda":
        library = open_library(settings)
        free = int(library.free_bytes())
        if free == 0:
            raise UsageError(
                f"the CUDA device cannot be used: {library.problem()}; --device cpu does without."
            )
        return free
    return free_memory_bytes()
