"""What formats cost in quality, as `bench/quality.py` measures it on a golden model."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import quality
from bench.report import Report
from kslserve.engine.native import isa_names

GOLDENS = Path(__file__).resolve().parents[1] / "data" / "golden"
KL_MOST = {  # nats, about three times what they cost
    "kv_bf16": 2e-6, "kv_int8_g64": 4e-5, "kv_fp8": 6e-4, "kv_q4": 3e-3, "kv_int4_g32": 8e-3,
    "kv_int8ring_int4": 4e-5, "activations_auto": 2.5e-3,
}  # fmt: skip


@pytest.mark.parametrize("name", ["g1-tied", "g2-untied"])
def test_formats_keep_to_what_they_cost_and_controls_fail(name: str) -> None:
    """The floor is what roundings of another instruction set make; a cache without its values, or
    with two bits a number, is found out."""
    report = Report("quality")
    args = argparse.Namespace(model=str(GOLDENS / name), text="", tokens=0, chunk=64)
    assert quality.run(args, report) == []
    rows = {row["case"]: row for row in report.rows}
    assert rows["reference"]["positions"] >= 100
    if len(isa_names()) > 1:
        assert abs(rows["floor"]["kl"]) < 1e-7
        assert rows["floor"]["top1"] == 1
    measured = [case for case in KL_MOST if case in rows]
    assert {"kv_bf16", "kv_fp8", "kv_q4", "kv_int4_g32", "activations_auto"} <= set(measured)
    for case in measured:
        assert rows[case]["good"] == 1
        assert 0 < rows[case]["kl"] <= KL_MOST[case], case
    for control in ("control_values_zero", "control_two_bits"):
        assert rows[control]["good"] == 0
        assert rows[control]["kl"] > 4 * rows["kv_q4"]["kl"]
