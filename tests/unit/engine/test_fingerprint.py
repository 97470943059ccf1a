"""Fingerprints differ exactly where computed state may differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kslserve.engine.fingerprint import WHOLE_BYTES, fingerprint, head_fingerprint
from kslserve.engine.model import Fill, ModelSpec, TensorArg
from kslserve.engine.types import EngineInfo

SPEC = ModelSpec(64, 8, 16, ("linear", "full"), 2, 1, 4, 4, 1, 1, 4, 4, 4, 0, 60, 1e4, 1e-6, 99)
INFO = EngineInfo(
    name="native", vocab=64, hidden=8, layers=2, slots=1, slabs=1, blocks=4, block_tokens=16,
    blocks_per_slot=4, wave_columns=16, ring_depth=1, has_mtp=False, numerics="n",
)  # fmt: skip


def tensors() -> list[TensorArg]:
    big = np.arange(WHOLE_BYTES, dtype=np.float32)
    return [
        TensorArg("a", 0, WHOLE_BYTES, 1, data=big),
        TensorArg("b", 0, 4, 2, data=np.ones((4, 2), dtype=np.float32)),
        TensorArg("c", 1, 4, 2, fill=Fill(1, 5, 0.5)),
    ]


def test_equal_inputs_are_equal() -> None:
    expected = fingerprint(SPEC, tensors(), INFO)
    assert fingerprint(SPEC, reversed(tensors()), replace(INFO, slots=9, blocks=77)) == expected
    as_bytes = tensors()
    as_bytes[1] = replace(as_bytes[1], data=as_bytes[1].data.tobytes())
    assert fingerprint(SPEC, as_bytes, INFO) == expected


@pytest.mark.parametrize(
    "change",
    ["spec", "kv_format", "block_tokens", "numerics", "small", "first", "last", "fill", "encoding"],
)
def test_any_difference_shows(change: str) -> None:
    spec, info, changed = SPEC, INFO, tensors()
    if change == "spec":
        spec = replace(spec, rope_theta=1e5)
    elif change in ("kv_format", "numerics"):
        info = replace(info, **{change: "other"})
    elif change == "block_tokens":
        info = replace(info, block_tokens=32)
    elif change == "small":
        changed[1].data[3, 1] = 2
    elif change in ("first", "last"):
        changed[0].data[0 if change == "first" else -1] = -1
    elif change == "fill":
        changed[2] = replace(changed[2], fill=Fill(1, 6, 0.5))
    else:
        changed[1] = replace(changed[1], encoding=1)
    assert fingerprint(spec, changed, info) != fingerprint(SPEC, tensors(), INFO)


def test_the_head_has_one_of_its_own() -> None:
    plain, head = tensors(), TensorArg("mtp.fc.weight", 0, 4, 2, data=np.ones((4, 2), np.float32))
    whole = [*plain, head]
    spec = replace(SPEC, mtp_layers=1)
    assert fingerprint(spec, whole, replace(INFO, has_mtp=True)) == fingerprint(SPEC, plain, INFO)
    assert head_fingerprint(plain) == bytes(32)
    found = head_fingerprint(whole)
    assert len(found) == 32
    assert found != bytes(32)
    other = replace(head, data=np.zeros((4, 2), np.float32))
    assert head_fingerprint([*plain, other]) != found
