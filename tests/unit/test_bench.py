"""What benches must not get wrong: a device that fails its tests is not timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.churn import Memory
from bench.device import prove
from bench.report import Report

PASSES, FAILS = "def test_a():\n    pass\n", "def test_b():\n    raise AssertionError\n"
SKIPPED = "import pytest\n\ndef test_c():\n    pytest.skip('no device')\n"
BROKEN = "import pytest\n\n@pytest.fixture\ndef none():\n    1 / 0\n\ndef test_d(none):\n    pass\n"


@pytest.mark.parametrize(
    ("text", "right", "counts"),
    [
        (PASSES, True, (1, 0, 0)),
        (PASSES + FAILS, False, (1, 1, 0)),
        (SKIPPED, False, (0, 0, 1)),
        (PASSES + BROKEN, False, (1, 1, 0)),
    ],
)
def test_what_is_proven(
    tmp_path: Path, text: str, right: bool, counts: tuple[int, int, int]
) -> None:
    (tmp_path / "test_it.py").write_text(text)
    report = Report("device")
    assert prove(report, [str(tmp_path)]) == right
    (row,) = report.rows
    assert (row["passed"], row["wrong"], row["skipped"]) == counts


def test_tests_that_cannot_be_collected(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import nothing_of_that_name\n")
    assert not prove(Report("device"), [str(tmp_path)])


def test_growth_of_memory() -> None:
    memory = Memory(None, 0, 0, 0)  # type: ignore[arg-type]
    memory.readings = [(10.0 * i, 1000 + 2 * i, 500) for i in range(9)]
    assert memory.figures() == {
        "host_mib": 1000,
        "host_growth_mib_min": pytest.approx(12),
        "host_late_mib": 12,
        "device_mib": 500,
        "device_growth_mib_min": 0,
        "device_late_mib": 0,
    }
    memory.readings = memory.readings[:3]
    with pytest.raises(SystemExit, match="too few readings"):
        memory.figures()
