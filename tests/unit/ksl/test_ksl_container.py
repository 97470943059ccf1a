from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_E2M3, ENCODING_NAMES
from kslserve.engine.model import TensorArg
from kslserve.errors import ModelFileError
from kslserve.ksl.container import open_container, verify
from kslserve.ksl.convert import Progress, convert
from kslserve.ksl.layout import EMBEDDING, HEAD
from kslserve.ksl.open import open_model
from kslserve.ksl.publish import UNFINISHED
from tests.unit.ksl import ksl_build
from tests.unit.ksl import ksl_reference as reference
from tests.unit.ksl.ksl_build import folder, loaded, text_config
from tests.unit.ksl.test_ksl_folder import MATRIX, fp8_items

WEIGHTS = ("fp6", "nvfp4", "nvfp4-mlp", "bf16")
relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def model_folder(path: Path, **changes: Any) -> Path:
    config = text_config(**{"intermediate_size": 304, **changes})
    folder(path, config)
    (path / "tokenizer.json").write_bytes(ksl_build.tokenizer(60))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "generation_config.json").write_text('{"top_k": 7}')
    return path


@pytest.fixture(scope="module")
def fp6(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole fp6 container."""
    base = tmp_path_factory.mktemp("fp6")
    convert(str(model_folder(base / "m")), str(base / "m.ksl"))
    return (base / "m.ksl").read_bytes()


def same(a: TensorArg, b: TensorArg) -> bool:
    def parts(arg: TensorArg) -> list[bytes | None]:
        return [None if p is None else bytes(p) for p in (arg.data, arg.scales, arg.globals_)]

    return (a.encoding, a.rows, a.cols, parts(a)) == (b.encoding, b.rows, b.cols, parts(b))


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_model(str(path))
    for part in (str(path), *parts):
        assert part in caught.value.message
    assert caught.value.message.endswith(".")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_container_is_the_folder_quantized(tmp_path: Path, weights: str, tied: bool) -> None:
    source = model_folder(tmp_path / "m", tie_word_embeddings=tied)
    with open_model(str(source), weights="bf16") as model:
        values = {
            arg.name: codecs.decode(arg.encoding, arg.data, None, None, arg.rows, arg.cols)
            for arg in loaded(model)
        }
    done = convert(str(source), str(tmp_path / "c.ksl"), weights=weights)
    assert (done.weights, done.notes) == (weights, ())
    assert done.size == (tmp_path / "c.ksl").stat().st_size
    assert verify(str(tmp_path / "c.ksl")) == []
    with (
        open_model(str(source), weights=weights) as before,
        open_model(str(tmp_path / "c.ksl")) as after,
    ):
        assert [a.name for a in after.tensors] == [a.name for a in before.tensors]
        assert all(same(a, b) for a, b in zip(loaded(after), loaded(before), strict=True))
        for field in ("spec", "weights", "head", "tokenizer_json", "chat_template", "config"):
            assert getattr(after, field) == getattr(before, field)
        assert after.generation == before.generation
        for arg in loaded(after):  # and it is what an independent quantizer makes of the source
            name = ENCODING_NAMES[arg.encoding]
            if name in ("e2m3", "nvfp4"):
                stored = EMBEDDING if tied and arg.name == HEAD else arg.name
                expected = reference.encode(name, values[stored])
                found = (arg.data, arg.scales, arg.globals_)
                assert [p is None or p.tobytes() for p in found] == [
                    p is None or p.tobytes() for p in expected
                ]
        assert after.generation.top_k == 7
        assert after.name == "c"


def test_fp8_sources_keep_their_codes_or_are_quantized(tmp_path: Path) -> None:
    config = text_config(intermediate_size=300)
    source = folder(tmp_path / "m", config, fp8_items(config))
    convert(str(source), str(tmp_path / "raw.ksl"), weights="bf16")
    convert(str(source), str(tmp_path / "once.ksl"), weights="fp6")
    convert(str(tmp_path / "raw.ksl"), str(tmp_path / "twice.ksl"), weights="fp6")
    with open_model(str(source), weights="bf16") as a, open_model(str(tmp_path / "raw.ksl")) as b:
        assert all(same(x, y) for x, y in zip(loaded(a), loaded(b), strict=True))
        assert ENCODING_NAMES[{t.name: t for t in loaded(b)}[MATRIX].encoding] == "fp8"
        assert b.notes == ("1 matrices stay block-FP8, as they are stored",)
    once, twice = (
        open_container(str(tmp_path / "once.ksl")),
        open_container(str(tmp_path / "twice.ksl")),
    )
    assert once.stored == twice.stored
    assert once.stored[MATRIX].encoding == ENC_E2M3
    assert all(same(once.read(name), twice.read(name)) for name in once.stored)
    once.close()
    twice.close()


def test_the_same_source_gives_the_same_bytes(tmp_path: Path, fp6: bytes) -> None:
    source = model_folder(tmp_path / "other-name")
    for name in ("a.ksl", "b.ksl"):
        convert(str(source), str(tmp_path / name))
    assert (tmp_path / "a.ksl").read_bytes() == (tmp_path / "b.ksl").read_bytes() == fp6
    convert(str(tmp_path / "a.ksl"), str(tmp_path / "c.ksl"))
    assert (tmp_path / "c.ksl").read_bytes() == fp6


def test_the_safetensors_package_reads_it(tmp_path: Path, fp6: bytes) -> None:
    from safetensors import safe_open

    path = tmp_path / "m.ksl"
    path.write_bytes(fp6)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
        assert metadata["format"] == "ksl2"
        table = json.loads(metadata["ksl"])
        item = table["tensors"][MATRIX]
        assert (item["encoding"], item["shape"], item["block"]) == ("e2m3", [304, 32], [128, 128])
        codes, scales = file.get_tensor(f"{MATRIX}.codes"), file.get_tensor(f"{MATRIX}.scales")
        assert (codes.dtype, codes.shape, scales.shape) == (np.uint8, (304, 24), (3, 1))
        digest = hashlib.sha256(codes.tobytes() + scales.tobytes()).hexdigest()
        assert item["sha256"] == digest
        assert bytes(file.get_tensor("file/chat_template.jinja")) == b"{{ messages }}"


def test_data_starts_are_aligned(fp6: bytes) -> None:
    size = int.from_bytes(fp6[:8], "little")
    header = json.loads(fp6[8 : 8 + size])
    del header["__metadata__"]
    for name, item in header.items():
        if not name.startswith("pad/"):
            assert (8 + size + item["data_offsets"][0]) % 64 == 0, name


def test_progress_has_a_line_per_layer(tmp_path: Path) -> None:
    class Heard(Progress):
        def __init__(self) -> None:
            self.groups: list[tuple[str, int, int]] = []
            self.shares: list[tuple[int, int]] = []

        def group(self, name: str, tensors: int, size: int) -> None:
            self.groups.append((name, tensors, size))

        def advance(self, done: int, total: int) -> None:
            self.shares.append((done, total))

    heard = Heard()
    done = convert(str(model_folder(tmp_path / "m")), str(tmp_path / "m.ksl"), progress=heard)
    layers = [f"layer {n}" for n in range(4)]
    names = [name for name, _, _ in heard.groups]
    assert names == ["model.embed_tokens", *layers, "model.norm", "mtp", "lm_head"]
    assert [count for _, count, _ in heard.groups] == [1, 14, 14, 14, 11, 1, 15, 1]
    with open_model(str(tmp_path / "m.ksl")) as model:
        parts = [p for t in loaded(model) for p in (t.data, t.scales, t.globals_) if p is not None]
    assert sum(size for _, _, size in heard.groups) == sum(part.nbytes for part in parts)
    assert done.size > sum(size for _, _, size in heard.groups)
    assert heard.shares == sorted(heard.shares)
    assert heard.shares[-1][0] == heard.shares[-1][1]


def test_nothing_is_overwritten_and_nothing_is_left(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m")
    taken = tmp_path / "taken.ksl"
    taken.write_bytes(b"mine")
    with pytest.raises(ModelFileError, match="exists already"):
        convert(str(source), str(taken))

    class TakeLate(Progress):
        def advance(self, done: int, total: int) -> None:
            (tmp_path / "late.ksl").write_bytes(b"mine")

    with pytest.raises(ModelFileError, match="File exists"):
        convert(str(source), str(tmp_path / "late.ksl"), progress=TakeLate())
    assert taken.read_bytes() == (tmp_path / "late.ksl").read_bytes() == b"mine"
    with pytest.raises(ModelFileError, match="cannot write"):
        convert(str(source), str(tmp_path / "no" / "x.ksl"))
    with pytest.raises(ModelFileError, match="without data"):
        convert("synth:test", str(tmp_path / "x.ksl"))

    class Stop(Progress):
        def advance(self, done: int, total: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(str(source), str(tmp_path / "x.ksl"), progress=Stop())
    assert sorted(os.listdir(tmp_path)) == ["late.ksl", "m", "taken.ksl"]


def test_memory_holds_a_few_stripes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"hidden_size": 128, "vocab_size": 4096, "num_hidden_layers": 8}
    source = model_folder(tmp_path / "m", **changes)
    chunk = 128 * 128
    monkeypatch.setattr("kslserve.ksl.quantize.CHUNK_ELEMENTS", chunk)
    convert(str(source), str(tmp_path / "first.ksl"))  # imports and caches are warm now
    tracemalloc.start()
    try:
        done = convert(str(source), str(tmp_path / "m.ksl"), workers=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # a stripe in float32, bf16 and codes for each worker, and what waits for its turn
    assert done.size > 5 * 4096 * 128 // 4 * 3
    assert peak < 2 * 7 * chunk + 6 * 2 * chunk + (500 << 10)


def test_what_reads_back_differently_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kslserve.ksl.container.verify", lambda path: ["model.norm.weight"])
    with pytest.raises(ModelFileError, match=r"reads back differently: model\.norm\.weight"):
        convert(str(model_folder(tmp_path / "m")), str(tmp_path / "x.ksl"), check=True)
    assert os.listdir(tmp_path) == ["m"]


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fp6: bytes) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    convert(str(model_folder(tmp_path / "m")), str(tmp_path / "x.ksl"))
    assert (tmp_path / "x.ksl").read_bytes() == fp6
    assert sorted(os.listdir(tmp_path)) == ["m", "x.ksl"]


def test_every_other_truncation_is_refused(tmp_path: Path, fp6: bytes) -> None:
    path = tmp_path / "m.ksl"
    for length in [*range(0, 2000, 53), *range(2000, len(fp6), 4999), len(fp6) - 1]:
        path.write_bytes(fp6[:length])
        refused(path)


@relaxed
@given(position=st.integers(0, 10**9), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_found(
    tmp_path: Path, fp6: bytes, position: int, value: int
) -> None:
    position %= len(fp6)
    data = bytearray(fp6)
    data[position] = value
    path = tmp_path / "m.ksl"
    path.write_bytes(bytes(data))
    try:
        open_model(str(path)).close()
        wrong = verify(str(path))
    except ModelFileError as error:
        refused(path, error.message)
    else:
        size = int.from_bytes(fp6[:8], "little")
        if wrong:
            assert value != fp6[position]
            assert all(name in open_names(fp6) for name in wrong)
        elif position >= 8 + size:
            assert value == fp6[position] or in_padding(fp6, position)


def open_names(data: bytes) -> set[str]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    table = json.loads(header["__metadata__"]["ksl"])
    return set(table["tensors"]) | {f"file/{name}" for name in table["files"]}


def in_padding(data: bytes, position: int) -> bool:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    at = position - 8 - size
    return any(
        name.startswith("pad/") and item["data_offsets"][0] <= at < item["data_offsets"][1]
        for name, item in header.items()
    )


def with_table(data: bytes, change: dict[str, Any], rename: dict[str, str] | None = None) -> bytes:
    """The file with parts of its `ksl` metadata (dotted paths) replaced and entries renamed."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    table = json.loads(header["__metadata__"]["ksl"])
    for path, value in change.items():
        at: Any = table
        *way, last = path.split("/")
        for key in way:
            at = at[key]
        if value is None:
            del at[last]
        else:
            at[last] = value
    header["__metadata__"]["ksl"] = json.dumps(table)
    for old, new in (rename or {}).items():
        header[new] = header.pop(old)
    return ksl_build.with_header(json.dumps(header).encode(), data[8 + size :])


@pytest.mark.parametrize(
    ("change", "rename", "text"),
    [
        ({"version": 2}, {}, "expected container version 1, found 2"),
        ({"weights": "int3"}, {}, "unknown encodings"),
        ({"tensors": None}, {}, "expected `tensors`"),
        ({f"tensors/{MATRIX}": 1}, {}, "known encoding"),
        ({f"tensors/{MATRIX}/encoding": "e9m9"}, {}, "known encoding"),
        ({f"tensors/{MATRIX}/encoding": "nvfp4"}, {}, "block [1, 16]"),
        ({f"tensors/{MATRIX}/block": [64, 64]}, {}, "expected the block [128, 128]"),
        ({f"tensors/{MATRIX}/shape": [304]}, {}, "multiple of 4"),
        ({f"tensors/{MATRIX}/shape": [304, 0]}, {}, "one or two sizes"),
        ({f"tensors/{MATRIX}/shape": [304, 30]}, {}, "e2m3 needs a multiple of 4"),
        ({f"tensors/{MATRIX}/shape": [304, 36]}, {}, "expected U8 [304, 27]"),
        ({f"tensors/{MATRIX}": None}, {}, f"'{MATRIX}.codes', which"),
        ({}, {f"{MATRIX}.scales": "pad/x"}, f"expected the entry '{MATRIX}.scales'"),
        ({}, {"file/config.json": "pad/x"}, "expected the entry file/config.json"),
        ({}, {"file/tokenizer.json": "junk"}, "'junk'"),
        ({f"tensors/{HEAD}/shape": [32, 64]}, {}, HEAD),
    ],
)
def test_metadata_lies_are_named(
    tmp_path: Path, fp6: bytes, change: dict[str, Any], rename: dict[str, str], text: str
) -> None:
    path = tmp_path / "m.ksl"
    path.write_bytes(with_table(fp6, change, rename))
    refused(path, text)


def test_other_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "m.ksl"
    for data, text in [
        (b"KSL1" + bytes(200), "expected model_family at byte 12 to be 1 (qwen3_5), found 0"),
        (b"TQF1" + bytes(200), "found TQF1, the old signature"),
        (UNFINISHED + bytes(200), "an interrupted conversion left"),
        (b"GGUF" + bytes(200), "a GGUF file"),
        (ksl_build.safetensors({}), "metadata format ksl2, found None"),
        (ksl_build.safetensors({}, {"format": "pt"}), "found 'pt'"),
        (ksl_build.safetensors({}, {"format": "ksl2"}), "expected the metadata `ksl`"),
        (ksl_build.safetensors({}, {"format": "ksl2", "ksl": "\udc80"}), "UTF-8"),
        (ksl_build.safetensors({}, {"format": "ksl2", "ksl": "1"}), "a JSON object"),
    ]:
        path.write_bytes(data)
        refused(path, text)
    refused(tmp_path / "missing", "No such file")


def test_requests_that_a_quantized_container_cannot_meet(tmp_path: Path, fp6: bytes) -> None:
    path = tmp_path / "m.ksl"
    path.write_bytes(fp6)
    for weights in ("nvfp4", "bf16"):
        with pytest.raises(ModelFileError, match="convert the original model"):
            open_model(str(path), weights=weights)
    with open_model(str(path), head="bf16") as model:
        assert HEAD not in {a.name for a in loaded(model)}
    with open_model(str(path), weights="fp6") as model:
        assert HEAD in {a.name for a in loaded(model)}
