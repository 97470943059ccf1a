"""The CUDA library on a device; without either, every test of this folder is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kslserve.engine.cuda import CudaLibrary, device_present, load_library
from tests.native.driver import Driver


@pytest.fixture(scope="session")
def cuda() -> CudaLibrary:
    if not device_present():
        pytest.skip("no CUDA device, or no CUDA library")
    return load_library()


Opener = Callable[..., Driver]


@pytest.fixture
def opened(cuda: CudaLibrary) -> Iterator[Opener]:
    """Opens drivers on the device by default, `on="cpu"` on the scalar reference; closes them."""
    drivers: list[Driver] = []

    def opener(*args: Any, on: str = "cuda", **options: Any) -> Driver:
        place = {"library": cuda} if on == "cuda" else {"isa": "scalar", "threads": 4}
        drivers.append(Driver(*args, **place, **options))
        return drivers[-1]

    yield opener
    for driver in drivers:
        driver.close()
