"""Fixtures of the engine's own tests. Without the extension they fail; nothing is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.native.driver import ISA_PATHS, Driver
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors, wide_spec


class Engines:
    """Engines of the tiny model (every encoding in it), opened once for all tests. A test begins
    its own sequences, so nothing is left over from another.
    The KV formats but f32 have heads of 64 dimensions, which all of them take; so has f32 with
    `wide`."""

    def __init__(self) -> None:
        self._models = {}
        for wide, spec in ((False, tiny_spec()), (True, wide_spec())):
            self._models[wide] = spec, tiny_tensors(spec, tiny_arrays(spec), "mixed")
        self._open: dict[tuple[str, str, int, str, bool], Driver] = {}

    def get(
        self,
        isa: str = "auto",
        kv: str = "f32",
        threads: int = 1,
        activations: str = "float",
        wide: bool = False,
    ) -> Driver:
        wide = wide or kv != "f32"
        key = (isa, kv, threads, activations, wide)
        if key not in self._open:
            self._open[key] = Driver(
                *self._models[wide],
                isa=isa,
                kv=kv,
                threads=threads,
                activations=activations,
            )
        return self._open[key]

    def close(self) -> None:
        for driver in self._open.values():
            driver.close()


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    found = Engines()
    yield found
    found.close()


@pytest.fixture(params=ISA_PATHS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set path that this machine runs."""
    return str(request.param)


@pytest.fixture
def tiny(engines: Engines) -> Driver:
    """The best path, float32 KV, one thread."""
    return engines.get()
