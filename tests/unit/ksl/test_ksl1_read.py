"""Reading KSL1 files made by an independent writer: every layout, and all that is refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_BF16, ENC_E2M3, ENC_F32, ENC_FP8, ENC_NVFP4
from kslserve.engine.model import TensorArg
from kslserve.errors import ModelFileError
from kslserve.ksl.ksl1 import open_ksl1
from kslserve.ksl.layout import HEAD
from kslserve.ksl.open import open_model, open_source
from tests.unit.ksl import ksl1_reference as one
from tests.unit.ksl import ksl_build
from tests.unit.ksl import ksl_reference as reference
from tests.unit.ksl.ksl_build import loaded

MODEL = one.Model()
VALUES = MODEL.values()
GATE = "model.layers.0.mlp.gate_proj.weight"


def matrices(flags: int, model: one.Model = MODEL, **how: Any) -> dict[str, one.Matrix]:
    return {
        name: one.quantize(VALUES[name], flags, **how)
        for name, kind, _, _ in model.tensors(mtp=False)
        if kind == "q"
    }


@pytest.fixture(scope="module")
def production() -> bytes:
    return one.write(MODEL, VALUES, matrices(one.PRODUCTION))


def put(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "m.ksl"
    path.write_bytes(data)
    return str(path)


def decoded(arg: TensorArg) -> np.ndarray:
    return codecs.decode(arg.encoding, arg.data, arg.scales, arg.globals_, arg.rows, arg.cols)


def check(path: str, flags: int, made: dict[str, one.Matrix], encoding: int | None) -> None:
    """All tensors of the file are what was written."""
    source = open_ksl1(path)
    names = [name for name, _, _, _ in MODEL.tensors(bool(flags & one.MTP))]
    assert sorted(source.stored) == sorted(names)
    for name, kind, rows, cols in MODEL.tensors(bool(flags & one.MTP)):
        arg = source.read(name)
        assert (arg.rows, arg.cols) == (rows, cols)
        if kind == "q":
            assert encoding in (None, arg.encoding), name
            expected = one.values_of(made[name], flags)
            found = decoded(arg)
            if flags & one.BLOCKS:
                assert found.tobytes() == expected.astype(np.float32).tobytes(), name
            else:  # a product with the reciprocal for a quotient
                np.testing.assert_allclose(found, expected, rtol=2e-7, atol=0)
        else:
            assert arg.encoding == (ENC_F32 if kind == "f" else ENC_BF16)
            assert decoded(arg).tobytes() == VALUES[name].tobytes(), name
        for begin in range(0, rows, 128):
            part = source.rows(name, begin, min(begin + 128, rows))
            assert decoded(part).tobytes() == decoded(arg)[begin : begin + 128].tobytes()
    source.close()


@pytest.mark.parametrize("ties", ["down", "up"])
@pytest.mark.parametrize("flags", [one.PRODUCTION, 0x13D])
def test_fp6(tmp_path: Path, flags: int, ties: str) -> None:
    """Codes and scales are the file's own, whichever of the two public encoders chose them."""
    made = matrices(flags, ties=ties)
    path = put(tmp_path, one.write(MODEL, VALUES, made, flags))
    check(path, flags, made, ENC_E2M3)
    source = open_ksl1(path)
    for name, matrix in made.items():
        arg = source.read(name)
        assert arg.data.tobytes() == reference.pack6(matrix.codes).tobytes()
        powers = np.log2(matrix.scales).astype(int) + 127
        assert arg.scales.reshape(-1).tolist() == powers.reshape(-1).tolist()
    source.close()


def test_the_two_tie_rules_differ(tmp_path: Path) -> None:
    down, up = (matrices(one.PRODUCTION, ties=ties)[GATE] for ties in ("down", "up"))
    share = (down.codes != up.codes).mean()
    assert 0.01 < share < 0.1
    error = [
        np.sqrt(np.mean((one.values_of(m, one.PRODUCTION) - VALUES[GATE]) ** 2))
        / np.sqrt(np.mean(VALUES[GATE] ** 2))
        for m in (down, up)
    ]
    assert all(0.02 < e < 0.04 for e in error)


@pytest.mark.parametrize("flags", [0x03D, 0x07D, 0x0BD, 0x01D, 0x43D])
def test_fp8(tmp_path: Path, flags: int) -> None:
    made = matrices(flags)
    path = put(tmp_path, one.write(MODEL, VALUES, made, flags))
    check(path, flags, made, ENC_FP8)
    with open_model(path, weights="bf16") as model:
        assert {a.encoding for a in loaded(model) if a.name == GATE} == {ENC_FP8}
        assert any("stay block-FP8" in note for note in model.notes)
    with open_model(path) as model:
        assert {a.encoding for a in loaded(model) if a.name == GATE} == {ENC_E2M3}


def test_scales_that_are_no_powers_of_two(tmp_path: Path) -> None:
    """They are multiplied in full, not cut to their exponent, and never quantized again."""
    flags = one.PRODUCTION
    made = matrices(flags, policy="float")
    path = put(tmp_path, one.write(MODEL, VALUES, made, flags))
    check(path, flags, made, None)
    with open_model(path) as model:
        by_name = {a.name: a for a in loaded(model)}
        assert by_name[GATE].encoding == ENC_FP8
        assert by_name["mtp.fc.weight"].encoding == ENC_E2M3
        assert any("scales that FP6 cannot hold" in note for note in model.notes)
    with open_model(path, weights="nvfp4") as model:
        assert {a.name: a for a in loaded(model)}[GATE].encoding == ENC_FP8


@pytest.mark.parametrize("flags", [one.PRODUCTION, 0x03D])
@pytest.mark.parametrize("kind", ["powers", "same", "any", "huge"])
def test_a_scale_per_32_columns(tmp_path: Path, flags: int, kind: str) -> None:
    made = matrices(flags)
    random = np.random.default_rng(2)
    for matrix in made.values():
        rows, cols = matrix.codes.shape
        shape = (-(-rows // 128), cols // 32)
        fine = np.repeat(matrix.scales, 4, 1)[:, : shape[1]]
        if kind == "powers":
            fine = fine * np.exp2(random.integers(-2, 3, shape))
        elif kind == "huge":
            fine = np.exp2(random.integers(-60, 60, shape) * 2.0)
        elif kind == "any":
            fine = fine * random.uniform(0.5, 2, shape)
        matrix.scales = fine.astype(np.float32)
    path = put(tmp_path, one.write(MODEL, VALUES, made, flags))
    check(path, flags, made, None)
    source = open_ksl1(path)
    found = {source.stored[name].encoding for name in made}
    same = ENC_E2M3 if flags & one.E2M3 else ENC_FP8
    wide = {"powers": ENC_BF16, "same": same, "any": ENC_F32, "huge": ENC_F32}[kind]
    assert wide in found
    assert found <= {wide, same, ENC_BF16}
    source.close()


def test_scales_at_the_ends(tmp_path: Path) -> None:
    made = matrices(one.PRODUCTION)
    grid = made[GATE].scales
    grid[0, 0], grid[0, 1], grid[1, 0] = 2.0**127, 2.0**-126, 2.0**-127
    path = put(tmp_path, one.write(MODEL, VALUES, made))
    source = open_ksl1(path)
    assert source.read(GATE).scales.reshape(-1)[:3].tolist() == [254, 1, 0]
    source.close()
    grid[0, 0] = 2.0**-130  # below what FP6 scales reach: FP8 keeps it
    path = put(tmp_path, one.write(MODEL, VALUES, made))
    source = open_ksl1(path)
    assert source.stored[GATE].encoding == ENC_FP8
    expected = one.values_of(made[GATE], one.PRODUCTION)
    assert decoded(source.read(GATE)).tobytes() == expected.astype(np.float32).tobytes()
    source.close()


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_served(tmp_path: Path, tied: bool) -> None:
    model = one.Model(tied=tied)
    path = put(tmp_path, one.write(model, VALUES, matrices(one.PRODUCTION, model)))
    with open_model(path) as opened:
        by_name = {arg.name: arg for arg in loaded(opened)}
        assert (opened.weights, opened.head, opened.name) == ("fp6", "fp6", "m")
        assert by_name["mtp.layers.0.mlp.up_proj.weight"].encoding == ENC_E2M3
        assert by_name["model.layers.0.linear_attn.in_proj_a.weight"].encoding == ENC_E2M3
        assert opened.notes == ()
        codes, scales, _ = reference.encode(
            "e2m3", VALUES["model.embed_tokens.weight" if tied else HEAD]
        )
        assert by_name[HEAD].data.tobytes() == codes.tobytes()
        assert by_name[HEAD].scales.tobytes() == scales.tobytes()
        assert opened.spec.norm_eps == 1e-6
        assert opened.spec.layer_kinds == ("linear", "linear", "full")
    with open_model(path, weights="nvfp4") as opened:
        by_name = {arg.name: arg for arg in loaded(opened)}
        assert by_name[GATE].encoding == ENC_NVFP4
        assert by_name[HEAD].encoding == by_name["mtp.fc.weight"].encoding == ENC_E2M3
        assert any("rounded twice" in note for note in opened.notes)
    with pytest.raises(ModelFileError, match="from which bf16 cannot be made"):
        open_model(path, weights="bf16")


def test_texts_come_from_a_folder(tmp_path: Path, production: bytes) -> None:
    path = put(tmp_path, production)
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "tokenizer.json").write_bytes(ksl_build.tokenizer(100))
    (texts / "chat_template.jinja").write_text("{{ messages }}")
    (texts / "generation_config.json").write_text('{"top_k": 7}')
    with open_model(path) as model:
        assert (model.tokenizer_json, model.chat_template) == (None, None)
    with open_model(path, model_dir=str(texts)) as model:
        assert model.tokenizer_json == ksl_build.tokenizer(100)
        assert model.chat_template == "{{ messages }}"
        assert (model.generation.top_k, model.spec.token_limit) == (7, 100)
        assert model.generation.eos_ids == (99, 98)
    config = MODEL.config()
    (texts / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    with open_model(path, model_dir=str(texts)) as model:
        assert model.config["eos_token_id"] == 5
        assert model.generation.eos_ids == (5, 99, 98)
    for change, name in [
        ({"hidden_size": 192}, "hidden"),
        ({"rms_norm_eps": 1e-5}, "norm_eps"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ]:
        (texts / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelFileError, match=f"config.json: expected {name} as in"):
            open_source(path, str(texts))


def refused(path: str, *parts: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_model(path)
    for part in (path, *parts):
        assert part in caught.value.message, caught.value.message
    assert caught.value.message.endswith(".")
    assert "\n" not in caught.value.message


def test_what_is_not_read(tmp_path: Path, production: bytes) -> None:
    body = production[119:]
    sparse = MODEL.header(one.PRODUCTION | 0x200) + body
    refused(put(tmp_path, sparse), "0x73d at byte 8", "no sparse 2:4 records", "bit 9")
    fp16 = MODEL.header(one.PRODUCTION & ~4, non_quant_dtype=1) + body
    refused(put(tmp_path, fp16), "non_quant_dtype 2 at byte 16", "found 1; only bf16 is read")
    refused(
        put(tmp_path, b"TQF1" + production[4:]),
        "expected the signature KSL1 at byte 0, found TQF1",
        "kslserve convert --migrate OLD NEW",
    )
    end = len(production)
    refused(
        put(tmp_path, production + b"x"),
        f"expected the file to end at byte {end}, after mtp.norm.weight, found {end + 1} bytes",
    )


def test_every_structural_border(tmp_path: Path, production: bytes) -> None:
    borders = one.borders(MODEL)
    assert borders[-1] == len(production)
    lengths = {border + near for border in borders for near in (-1, 0, 1)}
    path = put(tmp_path, production)
    for length in sorted(lengths & set(range(4, len(production))), reverse=True):
        os.truncate(path, length)
        refused(path)
    for length in (3, 2, 1, 0):
        os.truncate(path, length)
        refused(path, f"found {length} bytes: too short")


def test_every_bit_of_the_header(tmp_path: Path, production: bytes) -> None:
    path = tmp_path / "m.ksl"
    data = bytearray(production)
    harmless = 0
    sentences = []
    path.write_bytes(data)
    for bit in range(8 * 119):
        data[bit // 8] ^= 1 << bit % 8
        with open(path, "r+b") as file:
            file.write(data[:119])
        try:
            open_ksl1(str(path)).close()
        except ModelFileError as error:
            sentences.append(error.message)
        else:
            harmless += 1
        data[bit // 8] ^= 1 << bit % 8
    assert all(text.startswith(f"{path}: ") and text[-1] == "." for text in sentences)
    assert harmless < 8 * 119 // 3  # some say nothing about the walk: positions, mrope, theta


def grid_of(data: bytes) -> int:
    """Where the scale grid of the head starts."""
    return 119 + 2 * 208 * 160 + 2 * 160


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (struct.pack("<II", 3, 2), ["expected a scale grid of 2 x 2 or 2 x 5", "found 3 x 2"]),
        (struct.pack("<II", 2, 1 << 31), ["found 2 x 2147483648"]),
        (struct.pack("<IIf", 2, 2, 0.0), ["expected a positive finite scale", "found 0.0"]),
        (struct.pack("<IIf", 2, 2, -1.0), ["found -1.0"]),
        (struct.pack("<IIff", 2, 2, 1.0, float("nan")), ["found nan"]),
        (struct.pack("<IIf", 2, 2, float("inf")), ["found inf"]),
    ],
)
def test_scale_grids_that_lie(
    tmp_path: Path, production: bytes, change: bytes, parts: list[str]
) -> None:
    at = grid_of(production)
    data = production[:at] + change + production[at + len(change) :]
    refused(put(tmp_path, data), "tensor lm_head.weight", "at byte", *parts)


def test_a_multiplier_of_zero(tmp_path: Path) -> None:
    flags = 0x01D
    made = matrices(flags)
    for bad in (0.0, float("nan"), 1e-45):
        made[GATE].scales = np.array([bad], np.float32)
        path = put(tmp_path, one.write(MODEL, VALUES, made, flags))
        refused(path, f"tensor {GATE}", "positive finite")


def test_shapes_that_are_no_tiles(tmp_path: Path, production: bytes) -> None:
    head = MODEL.header(one.PRODUCTION, linear_num_value_heads=12)
    refused(put(tmp_path, head + production[119:]), "in_proj_a.weight [12, 160]", "multiples of 16")


def test_a_file_that_is_cut_while_in_use(tmp_path: Path, production: bytes) -> None:
    path = put(tmp_path, production)
    source = open_ksl1(path)
    with open(path, "r+b") as file:
        file.truncate(len(production) // 2)
    with pytest.raises(ModelFileError, match="it was cut while it was read"):
        source.read("mtp.fc.weight")
    source.close()
