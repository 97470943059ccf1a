"""Weights that an engine reads piece by piece while it opens: the same bits as from memory, and any
failure of a read is that of the open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kslserve.engine.codecs import encoding_sizes
from kslserve.engine.model import ModelSpec, Parts, TensorArg
from kslserve.engine.native import NativeEngine
from kslserve.engine.types import RowKind
from kslserve.errors import ModelFileError
from tests.native.driver import Driver
from tests.native.test_bridge import POOLS
from tests.tiny import tiny_arrays, tiny_spec, tiny_tensors

HEAD = "lm_head.weight"


class Slices:
    """A `read` over buffers in memory, in pieces of `height` rows at most."""

    def __init__(self, tensor: TensorArg, height: int) -> None:
        self.tensor, self.height = tensor, height
        self.asked: list[tuple[int, int]] = []
        self.fail_at = -1

    def __call__(self, begin: int, end: int) -> Iterator[Parts]:
        self.asked.append((begin, end))
        for low in range(begin, end, self.height):
            if 0 <= self.fail_at <= low:
                raise ModelFileError("the file is gone.")
            yield self._part(low, min(low + self.height, end))

    def _part(self, low: int, high: int) -> Parts:
        t = self.tensor
        lows = encoding_sizes(t.encoding, low, t.cols) if low else (0, 0, 0)
        highs = encoding_sizes(t.encoding, high, t.cols)
        codes, scales, globals_ = (
            None if buffer is None else memoryview(buffer).cast("B")[a:b]
            for buffer, a, b in zip((t.data, t.scales, t.globals_), lows, highs, strict=True)
        )
        return codes, scales, globals_

    def digest(self) -> bytes:
        return b""


def sliced(tensors: list[TensorArg], height: int) -> tuple[list[TensorArg], dict[str, Slices]]:
    """The tensors with a `read` in place of buffers."""
    reads = {t.name: Slices(t, height) for t in tensors}
    args = [TensorArg(t.name, t.encoding, t.rows, t.cols, read=reads[t.name]) for t in tensors]
    return args, reads


def logits(spec: ModelSpec, tensors: list[TensorArg]) -> list[bytes]:
    with Driver(spec, tensors) as driver:
        stream = driver.begin(0)
        taps = ["logits", "mtp_logits"]
        done = stream.run(stream.row(RowKind.LAST, [3, 77, 151, 20, 9, 188]), taps)
    return [done.taps[name].tobytes() for name in taps]


@pytest.mark.parametrize("policy", ["f32", "bf16", "fp8", "e2m3", "nvfp4", "mixed"])
def test_read_pieces_are_the_tensor(policy: str) -> None:
    spec = tiny_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), policy)
    args, reads = sliced(tensors, 128)
    assert logits(spec, args) == logits(spec, tensors)
    assert all(read.asked for read in reads.values())


@pytest.mark.parametrize("policy", ["fp8", "e2m3", "nvfp4"])
def test_large_tensors_are_asked_for_in_bounded_pieces(policy: str) -> None:
    spec = replace(tiny_spec(), vocab=110_001)  # over 4 MiB of codes in every encoding
    tensors = tiny_tensors(spec, tiny_arrays(spec), policy)
    args, reads = sliced(tensors, 1 << 14)
    assert logits(spec, args) == logits(spec, tensors)
    asked = reads[HEAD].asked
    assert len(asked) > 1
    assert [begin for begin, _ in asked] == [0, *(end for _, end in asked[:-1])]
    assert asked[-1][1] == spec.vocab
    head = next(t for t in tensors if t.name == HEAD)
    for begin, end in asked:
        assert begin % 128 == 0
        assert encoding_sizes(head.encoding, end - begin, head.cols)[0] <= 4 << 20


@pytest.mark.parametrize("fail_at", [0, 128])
@pytest.mark.parametrize(
    "name", [HEAD, "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "mtp.fc.weight"]
)
def test_a_failed_read_fails_the_open(name: str, fail_at: int) -> None:
    spec = tiny_spec()
    args, reads = sliced(tiny_tensors(spec, tiny_arrays(spec), "mixed"), 128)
    reads[name].fail_at = fail_at
    if reads[name].tensor.rows <= fail_at:
        reads[name].fail_at = 0
    with pytest.raises(ModelFileError, match=r"^the file is gone\.$"):
        NativeEngine.open(spec, args, POOLS, kv_format="f32", threads=1)


def test_pieces_of_another_size_are_refused() -> None:
    spec = tiny_spec()
    tensors = tiny_tensors(spec, tiny_arrays(spec), "mixed")
    args, reads = sliced(tensors, 128)
    read = reads[HEAD]
    read.tensor = replace(read.tensor, data=np.asarray(read.tensor.data)[:-1])
    with pytest.raises(AssertionError, match="all rows"):
        NativeEngine.open(spec, args, POOLS, kv_format="f32", threads=1)
    wrong = [replace(tensors[0], read=Slices(tensors[0], 128)), *tensors[1:]]
    with pytest.raises(ModelFileError, match="has a read function and other values"):
        NativeEngine.open(spec, wrong, POOLS, kv_format="f32", threads=1)
