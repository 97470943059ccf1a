"""Writing KSL1 files: read back by the independent reader, and by our own."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_BF16, ENC_E2M3
from kslserve.errors import ModelFileError
from kslserve.ksl.convert import convert
from kslserve.ksl.ksl1 import open_ksl1
from kslserve.ksl.layout import HEAD
from kslserve.ksl.open import open_model
from tests.unit.ksl import ksl1_reference as one
from tests.unit.ksl import ksl_build
from tests.unit.ksl import ksl_reference as reference
from tests.unit.ksl.ksl_build import Tensor, folder, loaded, nested, text_config


def items_of(
    model: one.Model, values: dict[str, np.ndarray], prefix: str = ""
) -> dict[str, Tensor]:
    """The bf16 tensors of a folder."""
    items: dict[str, Tensor] = {}
    for name, _, rows, cols in model.tensors(mtp=True):
        shape: tuple[int, ...] = (rows,) if cols == 1 else (rows, cols)
        if name.endswith("conv1d.weight"):
            shape = (rows, 1, cols)
        data = one.raw("n", values[name])
        if name.startswith("model."):
            name = prefix + name.removeprefix("model.")
        items[name] = ("BF16", shape, data)
    return items


def source_folder(path: Path, model: one.Model, values: dict[str, np.ndarray]) -> Path:
    return folder(path, model.config(), items_of(model, values, "model."))


def check_file(model: one.Model, data: bytes, values: dict[str, np.ndarray], flags: int) -> None:
    """Every tensor of a written file is what the independent quantizer makes of the source."""
    assert data[:119] == model.header(flags)
    found = one.read(model, data, flags)
    for name, kind, _, _ in model.tensors(bool(flags & one.MTP)):
        if kind != "q":
            assert found[name] == one.raw(kind, values[name]), name
            continue
        expected = one.quantize(values[name], flags)
        assert (found[name].codes == expected.codes).all(), name
        assert found[name].scales.tobytes() == expected.scales.tobytes(), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_becomes_ksl1(tmp_path: Path, tied: bool) -> None:
    model = one.Model(tied=tied)
    values = model.values()
    source = source_folder(tmp_path / "m", model, values)
    done = convert(str(source), str(tmp_path / "m.ksl"), file_format="ksl1", check=True)
    data = (tmp_path / "m.ksl").read_bytes()
    assert (done.size, done.notes) == (len(data), ())
    assert (done.weights, done.head) == ("fp6", "bf16" if tied else "fp6")
    check_file(model, data, values, one.PRODUCTION)
    # our reader gives the same codes and scales, in its own order
    ours = open_ksl1(str(tmp_path / "m.ksl"))
    assert (HEAD in ours.stored) != tied
    for name, kind, _, _ in model.tensors(mtp=True):
        if kind == "q":
            codes, scales, _ = reference.encode("e2m3", values[name])
            arg = ours.read(name)
            assert (arg.data.tobytes(), arg.scales.tobytes()) == (codes.tobytes(), scales.tobytes())
    ours.close()


def test_zeros_and_tiny_blocks(tmp_path: Path) -> None:
    """A block of zeros has the scale 1; negative zero keeps its sign; 2^-127 is a scale."""
    model = one.Model()
    values = model.values()
    name = "model.layers.0.mlp.gate_proj.weight"
    values[name][:128, :128] = 0
    values[name][3, 5] = -0.0
    values[name][128:256, :128] = np.float32(2.0**-126)
    source = source_folder(tmp_path / "m", model, values)
    convert(str(source), str(tmp_path / "m.ksl"), file_format="ksl1")
    data = (tmp_path / "m.ksl").read_bytes()
    found = one.read(model, data)[name]
    assert found.scales[0, 0] == 1
    assert found.codes[3, 5] == 0x20
    assert found.scales[1, 0] == np.float32(2.0**-127)
    assert (found.codes[128:256, :128] == 16).all()
    ours = open_ksl1(str(tmp_path / "m.ksl"))
    assert ours.stored[name].encoding == ENC_E2M3
    assert ours.read(name).scales.reshape(-1)[2] == 0
    ours.close()


def test_without_the_mtp_section(tmp_path: Path) -> None:
    model = one.Model()
    values = model.values()
    source = source_folder(tmp_path / "m", model, values)
    convert(str(source), str(tmp_path / "m.ksl"), file_format="ksl1", mtp=False)
    check_file(model, (tmp_path / "m.ksl").read_bytes(), values, 0x13D)
    convert(str(source), str(tmp_path / "c.ksl"), mtp=False)
    for name in ("m.ksl", "c.ksl"):
        with open_model(str(tmp_path / name)) as opened:
            assert opened.spec.mtp_layers == 0
            assert not any(arg.name.startswith("mtp.") for arg in loaded(opened))


def test_nested_configs_with_vision(tmp_path: Path) -> None:
    model = one.Model()
    values = model.values()
    items = items_of(model, values, "model.language_model.")
    source = folder(tmp_path / "m", nested(model.config()), items)
    convert(str(source), str(tmp_path / "m.ksl"), file_format="ksl1")
    data = (tmp_path / "m.ksl").read_bytes()
    assert data[:119] == model.header(one.PRODUCTION, has_vision_config=1)


def test_configs_without_rotary_sections(tmp_path: Path) -> None:
    model = one.Model()
    config = model.config()
    config["rope_parameters"] = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
    source = folder(tmp_path / "m", config, items_of(model, model.values(), "model."))
    convert(str(source), str(tmp_path / "m.ksl"), file_format="ksl1")
    assert struct.unpack_from("<4I", (tmp_path / "m.ksl").read_bytes(), 84) == (0, 0, 0, 0)


def test_there_and_back(tmp_path: Path) -> None:
    """folder -> KSL1 -> container -> KSL1 is the first KSL1 but for what the container quantized;
    KSL1 -> KSL1 is the same file."""
    model = one.Model()
    values = model.values()
    source = source_folder(tmp_path / "m", model, values)

    def to(old: str, new: str, **options: Any) -> bytes:
        convert(str(tmp_path / old), str(tmp_path / new), **options)
        return (tmp_path / new).read_bytes()

    first = to(source.name, "a.ksl", file_format="ksl1")
    assert to("a.ksl", "b.ksl", file_format="ksl1") == first
    to("a.ksl", "c.ksl")
    body = len(first) - sum(
        2 * rows * cols for name, _, rows, cols in model.tensors(mtp=True) if name[:4] == "mtp."
    )
    back = to("c.ksl", "d.ksl", file_format="ksl1")
    assert back[:body] == first[:body]
    # the container holds the MTP matrices in FP6; what comes back is what it decodes to
    name = "mtp.fc.weight"
    expected = reference.decode("e2m3", *reference.encode("e2m3", values[name]), 160, 320)
    assert one.read(model, back)[name] == one.raw("n", expected)
    with open_model(str(tmp_path / "c.ksl")) as a, open_model(str(tmp_path / "d.ksl")) as b:
        for x, y in zip(loaded(a), loaded(b), strict=True):
            assert x.name == y.name
            values_of = [
                codecs.decode(t.encoding, t.data, t.scales, t.globals_, t.rows, t.cols)
                for t in (x, y)
            ]
            assert values_of[0].tobytes() == values_of[1].tobytes(), x.name


def test_a_container_from_ksl1_has_a_config(tmp_path: Path) -> None:
    model = one.Model()
    source = source_folder(tmp_path / "m", model, model.values())
    convert(str(source), str(tmp_path / "a.ksl"), file_format="ksl1")
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "tokenizer.json").write_bytes(ksl_build.tokenizer(100))
    convert(str(tmp_path / "a.ksl"), str(tmp_path / "b.ksl"), model_dir=str(texts))
    with open_model(str(tmp_path / "b.ksl")) as opened:
        assert opened.tokenizer_json == ksl_build.tokenizer(100)
        assert opened.config["hidden_size"] == 160
    config = model.config() | {"eos_token_id": 9}
    (texts / "config.json").write_text(json.dumps(config))
    convert(str(tmp_path / "a.ksl"), str(tmp_path / "c.ksl"), model_dir=str(texts))
    with open_model(str(tmp_path / "c.ksl")) as opened:
        assert opened.config == config


def test_matrices_that_do_not_fit_are_named(tmp_path: Path) -> None:
    target = str(tmp_path / "m.ksl")
    source = folder(tmp_path / "m", text_config(intermediate_size=64))
    with pytest.raises(
        ModelFileError, match=r"layers\.0\.linear_attn\.in_proj_a\.weight \[2, 32\]"
    ):
        convert(str(source), target, file_format="ksl1")
    model = one.Model(inner=304)  # rows fit, columns of down_proj do not
    source = source_folder(tmp_path / "n", model, model.values())
    with pytest.raises(ModelFileError, match=r"down_proj\.weight \[160, 304\].*multiples of 32"):
        convert(str(source), target, file_format="ksl1")
    for options in ({"weights": "nvfp4"}, {"head": "bf16"}):
        with pytest.raises(ModelFileError, match="FP6 weights and an FP6 head only"):
            convert(str(source), target, file_format="ksl1", **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "n"]


def test_what_was_quantized_otherwise_is_refused(tmp_path: Path) -> None:
    model = one.Model()
    values = model.values()
    source = source_folder(tmp_path / "m", model, values)
    convert(str(source), str(tmp_path / "c.ksl"), weights="nvfp4")
    with pytest.raises(ModelFileError, match=r"quantized already \(nvfp4\)"):
        convert(str(tmp_path / "c.ksl"), str(tmp_path / "d.ksl"), file_format="ksl1")
    flags = one.PRODUCTION
    made = {
        name: one.quantize(values[name], flags, policy="float")
        for name, kind, _, _ in model.tensors(mtp=False)
        if kind == "q"
    }
    (tmp_path / "f.ksl").write_bytes(one.write(model, values, made))
    with pytest.raises(ModelFileError, match=r"lm_head\.weight is quantized already \(fp8\)"):
        convert(str(tmp_path / "f.ksl"), str(tmp_path / "d.ksl"), file_format="ksl1")
    # a container keeps them
    convert(str(tmp_path / "f.ksl"), str(tmp_path / "e.ksl"))
    with open_model(str(tmp_path / "e.ksl")) as opened:
        for arg in loaded(opened):
            if arg.name in made:
                found = codecs.decode(
                    arg.encoding, arg.data, arg.scales, arg.globals_, arg.rows, arg.cols
                )
                expected = one.values_of(made[arg.name], flags).astype(np.float32)
                assert found.tobytes() == expected.tobytes()


def test_float32_sources_are_rounded_and_it_is_said(tmp_path: Path) -> None:
    model = one.Model()
    values = model.values()
    items = items_of(model, values, "model.")
    name = "model.layers.0.linear_attn.dt_bias"
    exact = values[name] + np.float32(1e-5)
    items[name] = ("F32", (16,), exact.tobytes())
    log = "model.layers.0.linear_attn.A_log"
    items[log] = ("F32", (16,), values[log].tobytes())
    source = folder(tmp_path / "m", model.config(), items)
    done = convert(str(source), str(tmp_path / "m.ksl"), file_format="ksl1")
    assert done.notes == ("1 tensors are float32 in the source and rounded to bf16",)
    found = one.read(model, (tmp_path / "m.ksl").read_bytes())
    rounded = codecs.encode(ENC_BF16, exact.reshape(16, 1)).codes
    assert found[name] == rounded.tobytes()
    assert found[log] == values[log].tobytes()


def test_fp8_sources(tmp_path: Path) -> None:
    """Block-FP8 is decoded in float32 and encoded once; MTP becomes bf16."""
    model = one.Model()
    values = model.values()
    items = items_of(model, values, "model.")
    for name in ("model.layers.0.mlp.gate_proj.weight", "mtp.layers.0.mlp.up_proj.weight"):
        codes, scales, _ = reference.encode("fp8", values[name])
        rows, cols = values[name].shape
        items[name] = ("F8_E4M3", (rows, cols), codes.tobytes())
        items[name + "_scale_inv"] = ("BF16", scales.shape, one.raw("n", scales))
        values[name] = reference.decode("fp8", codes, scales, None, rows, cols)
    source = folder(tmp_path / "m", model.config(), items)
    convert(str(source), str(tmp_path / "m.ksl"), file_format="ksl1")
    check_file(model, (tmp_path / "m.ksl").read_bytes(), values, one.PRODUCTION)
