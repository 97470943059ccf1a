from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kslserve.errors import ModelFileError
from kslserve.ksl.safetensors import SafetensorsFile
from tests.unit.ksl import ksl_build

ITEMS: dict[str, ksl_build.Tensor] = {
    "a": ("F32", (2, 3), bytes(range(24))),
    "empty": ("U8", (0, 4), b""),
    "scalar": ("BF16", (), b"\x01\x02"),
    "b": ("U8", (5,), b"hello"),
}
relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(folder: Path, data: bytes) -> str:
    path = folder / "x.safetensors"
    path.write_bytes(data)
    return str(path)


def refused(path: str, *parts: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFile(path).close()
    for part in (path, *parts):
        assert part in caught.value.message
    assert caught.value.message.endswith(".")
    assert "\n" not in caught.value.message


def header(**items: object) -> bytes:
    return ksl_build.with_header(json.dumps(items).encode(), b"12345678")


def item(dtype: object = "U8", shape: object = (8,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_was_written(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path, ksl_build.safetensors(ITEMS, {"k": "v"})))
    assert file.metadata == {"k": "v"}
    assert set(file.entries) == set(ITEMS)
    for name, (dtype, shape, data) in ITEMS.items():
        assert (file.entries[name].dtype, file.entries[name].shape) == (dtype, shape)
        assert file.data(name).tobytes() == data
    file.close()
    file.close()


def test_reads_files_of_the_safetensors_package(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "y": np.ones(3, np.uint8)}
    save_file(arrays, tmp_path / "x.safetensors")
    file = SafetensorsFile(str(tmp_path / "x.safetensors"))
    for name, array in arrays.items():
        assert file.data(name).tobytes() == array.tobytes()
        assert file.entries[name].shape == array.shape
    file.close()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = ksl_build.safetensors(ITEMS, {"k": "v"})
    for length in range(len(whole)):
        refused(write(tmp_path, whole[:length]))
    refused(write(tmp_path, whole + b"x"), "expected the file to end at byte")


def test_parts(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path, ksl_build.safetensors(ITEMS)))
    assert file.part("b", 1, 4).tobytes() == b"ell"
    assert file.part("b", 5, 5).size == 0
    assert file.data("empty").size == 0
    with pytest.raises(AssertionError):
        file.part("b", 0, 6)
    file.close()


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    path = write(tmp_path, ksl_build.safetensors(ITEMS))
    file = SafetensorsFile(path)
    entry = file.entries["a"]
    os.truncate(path, entry.start + 5)
    text = f"expected 24 bytes at byte {entry.start}, but the file now ends at byte"
    with pytest.raises(ModelFileError, match=text):
        file.data("a")
    file.close()


def test_a_file_of_another_length_when_asked(tmp_path: Path) -> None:
    whole = ksl_build.safetensors(ITEMS)
    for data in (whole[:-3], whole + b"x"):
        file = SafetensorsFile(write(tmp_path, data), whole=False)
        assert (file.expected_size, file.actual_size) == (len(whole), len(data))
        file.close()


@relaxed
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    refused(write(tmp_path, data))


@relaxed
@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_changed_byte_is_read_or_refused(tmp_path: Path, position: int, value: int) -> None:
    whole = bytearray(ksl_build.safetensors(ITEMS, {"k": "v"}))
    whole[position % len(whole)] = value
    path = write(tmp_path, bytes(whole))
    try:
        file = SafetensorsFile(path)
    except ModelFileError as error:
        refused(path, error.message)
    else:
        assert all(file.data(name).size == e.end - e.start for name, e in file.entries.items())
        file.close()


@relaxed
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=10,
    ),
    key=st.sampled_from(["dtype", "shape", "data_offsets", None]),
)
def test_any_json_as_a_header_value(tmp_path: Path, value: object, key: str | None) -> None:
    entry: object = value if key is None else item() | {key: value}
    path = write(tmp_path, header(x=entry))
    try:
        SafetensorsFile(path).close()
    except ModelFileError as error:
        refused(path, error.message)
        error.message.encode("ascii")
    else:
        assert key is not None
        assert value in ("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", [8], [0, 8]) or (
            key == "shape" and isinstance(value, list)
        )


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (b"", ["found 0 bytes"]),
        ((1 << 63).to_bytes(8, "little") + b"x" * 8, ["header length", "at byte 0"]),
        ((50).to_bytes(8, "little") + b"{}", ["should end at byte 58", "has 10 bytes"]),
        (ksl_build.with_header(b"[]"), ["expected a JSON object"]),
        (ksl_build.with_header(b"\xff\xfe"), ["UTF-8", "0xff at byte 0"]),
        (ksl_build.with_header(b"{" * 99), ["expected JSON"]),
        (ksl_build.with_header(b"[" * 200_000), ["nested too deeply"]),
        (ksl_build.with_header(b'{"a": ' + b"9" * 5000 + b"}"), ["expected JSON"]),
        (ksl_build.with_header(b'{"a": 1, "a": 2}'), ["'a'", "twice"]),
        (header(__metadata__={"k": 1}), ["__metadata__"]),
        (header(__metadata__=[]), ["__metadata__"]),
        (header(x=item(dtype="F7")), ["'x'", "dtype 'F7'"]),
        (header(x=item(shape=[-8])), ["shape"]),
        (header(x=item(shape=[True, 8])), ["shape"]),
        (header(x=item(shape=[1] * 9)), ["shape"]),
        (header(x=item(shape=[1 << 61, 1 << 61])), ["expected 5316911983139663"]),
        (header(x=item(shape=[7])), ["expected 7 bytes for U8", "found 8"]),
        (header(x=item(offsets=[8, 0])), ["data_offsets"]),
        (header(x=item(offsets=[0, 9], shape=[9])), ["should end at byte", "has"]),
        (header(x=item(offsets=[0, 1 << 61])), ["should end at byte"]),
        (header(x=item(), y=item()), ["'y' overlaps the one before"]),
        (header(x=item(offsets=[1, 8], shape=[7])), ["'x' leaves a hole"]),
        (header(x=item(offsets=[0, 7], shape=[7])), ["expected the file to end"]),
        (header(x={"dtype": "U8"}), ["dtype, shape and data_offsets"]),
        (header(**{"\udc80": 1}), ["udc80"]),
    ],
)
def test_lies_are_named(tmp_path: Path, data: bytes, parts: list[str]) -> None:
    refused(write(tmp_path, data), *parts)


def test_things_that_are_not_regular_files(tmp_path: Path) -> None:
    refused(str(tmp_path), "regular file")
    refused(str(tmp_path / "missing"), "No such file")
    os.mkfifo(tmp_path / "pipe")
    refused(str(tmp_path / "pipe"), "regular file")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refused(str(tmp_path / "loop"), "symbolic links")
    refused("/dev/zero", "regular file")
    with pytest.raises(ModelFileError, match="null"):
        SafetensorsFile("a\0b")
