"""The CUDA library: the same C ABI as `_kslserve`, in a shared object that is loaded on demand.

`libksl_cuda.so` is looked for beside the `_kslserve` module and in `build/` of the source tree;
`python build.py cuda` makes it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import _kslserve
from _kslserve import ffi, lib

from kslserve.errors import EngineError

LIBRARY = "libksl_cuda.so"
FUNCTIONS = (
    "ksl_abi_hash", "ksl_version", "ksl_source_digest", "ksl_isa_list", "ksl_sizeof", "ksl_open",
    "ksl_get_info", "ksl_event_fd", "ksl_submit", "ksl_poll", "ksl_get_progress", "ksl_last_error",
    "ksl_close",
)  # fmt: skip


class CudaLibrary:
    """Functions of the CUDA library under their names; constants are those of `_kslserve.lib`."""

    def __init__(self, path: Path) -> None:
        try:
            # Kept: the functions live as long as it does.
            self._handle = ctypes.CDLL(str(path))
        except OSError as error:
            raise EngineError(f"{path} cannot be loaded: {error}.") from error
        for name in FUNCTIONS:
            address = ctypes.cast(getattr(self._handle, name), ctypes.c_void_p).value
            assert address is not None
            setattr(self, name, ffi.cast(ffi.typeof(getattr(lib, name)), address))
        for name in ("ksl_abi_hash", "ksl_source_digest"):
            own = ffi.string(getattr(lib, name)())
            if ffi.string(getattr(self, name)()) != own:
                raise EngineError(
                    f"{path} was built from other sources: run `python build.py cuda` again."
                )

        self._free = self._handle.ksl_cuda_free_bytes
        self._free.restype = ctypes.c_uint64
        self._problem = self._handle.ksl_cuda_problem
        self._problem.restype = ctypes.c_char_p
        self._read = self._handle.ksl_cuda_read_bandwidth
        self._read.restype, self._read.argtypes = ctypes.c_double, [ctypes.c_size_t]

    def free_bytes(self) -> int:
        """Free memory of the device; 0 where it cannot be asked."""
        return int(self._free())

    def problem(self) -> str:
        """Why the device cannot be used, in the words of the CUDA runtime; empty where it can."""
        return str(self._problem().decode())

    def read_bandwidth(self, size: int) -> float:
        """Bytes per second at which a plain kernel reads `size` bytes; 0 where it cannot run."""
        return max(float(self._read(size)), 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)


def find_library() -> Path | None:
    """The CUDA library, or None where it was not built."""
    module = Path(_kslserve.__file__).resolve().parent
    source = Path(__file__).resolve().parents[2] / "build"
    for folder in (module, source):
        if (folder / LIBRARY).is_file():
            return folder / LIBRARY
    return None


def load_library() -> CudaLibrary:
    """The loaded library. EngineError with one sentence where there is none."""
    path = find_library()
    if path is None:
        raise EngineError(
            f"--device cuda needs {LIBRARY} beside the native module: `python build.py cuda` "
            "makes it."
        )
    return CudaLibrary(path)


def device_present() -> bool:
    """Whether this machine has an NVIDIA device and the library is there; touches neither."""
    return Path("/dev/nvidia0").exists() and find_library() is not None
