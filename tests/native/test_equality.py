"""The CPU says of every property of the determinism contract that it holds bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from kslserve.engine.budget import KV_FORMATS
from kslserve.engine.equality import PROPERTIES
from tests.native.conftest import Engines
from tests.native.driver import ISA_PATHS
from tests.native.properties import EXPERIMENTS, NUMBERS, Pair, everything, stated

IDS = np.random.default_rng(31).integers(0, 199, 180).astype(np.int32)


@pytest.mark.parametrize("isa", ISA_PATHS)
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("arithmetic", ["float", "auto"])
def test_what_is_said_is_so(engines: Engines, isa: str, kv: str, arithmetic: str) -> None:
    driver = engines.get(isa, kv, activations=arithmetic)
    assert stated(driver) == dict.fromkeys(EXPERIMENTS, (0, 0))
    assert (driver.info.equal_columns, driver.info.equal_row) == (0, 0)
    for name, pair in everything(driver, IDS, 150).items():
        assert pair.equal, (name, pair.distance)


def test_the_experiments_are_those_of_the_contract() -> None:
    assert tuple(EXPERIMENTS) == PROPERTIES
    assert list(NUMBERS.values()) == list(range(len(PROPERTIES)))


def test_distances() -> None:
    plain = np.log(np.array([[1, 1, 2]], np.float32))
    assert Pair(plain, plain.copy()).equal
    other = np.log(np.array([[2, 1, 1]], np.float32))
    pair = Pair(plain, other)
    assert not pair.equal
    # 1/4 ln(1/2) + 1/2 ln 2
    assert pair.divergence == pytest.approx(0.25 * np.log(2))
    assert pair.distance == pytest.approx(2**0.5)
    # What softmax does not see moves no probability.
    assert Pair(plain, plain + 1).divergence == pytest.approx(0, abs=1e-7)
