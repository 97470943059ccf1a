from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_BF16, ENC_E2M3, ENC_F32, ENC_FP8
from kslserve.engine.model import TensorArg
from kslserve.errors import ModelFileError
from kslserve.ksl.layout import EMBEDDING, HEAD
from kslserve.ksl.open import open_model
from tests.unit.ksl import ksl_build
from tests.unit.ksl import ksl_reference as reference
from tests.unit.ksl.ksl_build import Tensor, folder, loaded, nested, tensors, text_config

MATRIX = "model.layers.0.mlp.gate_proj.weight"


def open_raw(path: Path) -> dict[str, TensorArg]:
    with open_model(str(path), weights="bf16") as model:
        return {arg.name: arg for arg in loaded(model)}


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        open_model(str(path), weights="bf16")
    for part in (str(path), *parts):
        assert part in caught.value.message
    assert caught.value.message.endswith(".")


def rewrite(path: Path, items: dict[str, Tensor]) -> None:
    (path / "model.safetensors").write_bytes(ksl_build.safetensors(items))


def test_bytes_are_handed_out_as_stored(tmp_path: Path) -> None:
    config = text_config()
    items = tensors(config)
    found = open_raw(folder(tmp_path / "m", config, items))
    assert found.keys() == items.keys()
    for name, (_, shape, data) in items.items():
        arg = found[name]
        assert bytes(arg.data) == data
        assert arg.encoding == ENC_BF16
        expected = (shape[0], 1) if len(shape) == 1 else (shape[0], shape[-1])
        assert (arg.rows, arg.cols) == expected


def test_model_file_fields(tmp_path: Path) -> None:
    path = folder(tmp_path / "my-model")
    (path / "tokenizer.json").write_bytes(ksl_build.tokenizer(60))
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 3}')
    with open_model(str(path)) as model:
        assert model.name == "my-model"
        assert model.spec.token_limit == 60
        assert model.generation.temperature == 0.5
        assert model.generation.eos_ids == (3, 59, 58)
        assert model.chat_template == "{{ messages }}"
        assert model.tokenizer_json == ksl_build.tokenizer(60)
        assert (model.weights, model.head, model.notes) == ("fp6", "fp6", ())
        assert {a.name: a for a in loaded(model)}[MATRIX].encoding == ENC_E2M3
    assert model.tensors == []
    model.close()


def test_without_text_files(tmp_path: Path) -> None:
    with open_model(str(folder(tmp_path / "m")), weights="bf16") as model:
        assert model.tokenizer_json is None
        assert model.chat_template is None
        assert model.spec.token_limit == 64
        assert model.generation.eos_ids == (3,)


@pytest.mark.parametrize(
    ("name", "content", "template"),
    [
        ("tokenizer_config.json", {"chat_template": "A"}, "A"),
        (
            "tokenizer_config.json",
            {
                "chat_template": [
                    {"name": "x", "template": "B"},
                    {"name": "default", "template": "C"},
                ]
            },
            "C",
        ),
        ("tokenizer_config.json", {"chat_template": None}, None),
        ("tokenizer_config.json", {}, None),
        ("chat_template.json", {"chat_template": "D"}, "D"),
    ],
)
def test_where_the_template_may_be(
    tmp_path: Path, name: str, content: object, template: str | None
) -> None:
    path = folder(tmp_path / "m")
    (path / name).write_text(json.dumps(content))
    with open_model(str(path), weights="bf16") as model:
        assert model.chat_template == template


def test_nested_names_and_the_vision_tower(tmp_path: Path) -> None:
    config = nested(text_config())
    items = tensors(config) | {"model.visual.pos_embed.weight": ("F32", (3,), bytes(12))}
    assert "model.language_model.norm.weight" in items
    flat = open_raw(folder(tmp_path / "flat"))
    found = open_raw(folder(tmp_path / "nested", config, items))
    assert found.keys() == flat.keys()
    assert all(bytes(found[n].data) == bytes(flat[n].data) for n in flat)


def test_shards(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    whole = open_raw(path)
    ksl_build.shard(path)
    found = open_raw(path)
    assert found.keys() == whole.keys()
    assert all(bytes(found[n].data) == bytes(whole[n].data) for n in whole)


def test_tied_and_untied_heads(tmp_path: Path) -> None:
    untied = text_config(tie_word_embeddings=False)
    assert HEAD in open_raw(folder(tmp_path / "untied", untied))
    tied = tensors(text_config()) | {HEAD: ("BF16", (64, 32), bytes(64 * 32 * 2))}
    path = folder(tmp_path / "tied", items=tied)
    assert HEAD not in open_raw(path)
    with open_model(str(path)) as model:
        assert any("lm_head.weight is not used" in note for note in model.notes)
        by_name = {a.name: a for a in loaded(model)}
    assert by_name[HEAD].encoding == ENC_E2M3
    assert by_name[EMBEDDING].encoding == ENC_BF16
    missing = tensors(untied)
    del missing[HEAD]
    refused(
        folder(tmp_path / "missing", untied, missing), "expected the tensor lm_head.weight [64, 32]"
    )


def test_mtp_by_what_is_there(tmp_path: Path) -> None:
    items = {n: t for n, t in tensors(text_config()).items() if not n.startswith("mtp.")}
    with open_model(str(folder(tmp_path / "none", items=items)), weights="bf16") as model:
        assert model.spec.mtp_layers == 0
        assert any("none is used" in note for note in model.notes)
    config = text_config(mtp_num_hidden_layers=0)
    path = folder(tmp_path / "unnamed", config, tensors(text_config()))
    with open_model(str(path), weights="bf16") as model:
        assert model.spec.mtp_layers == 0
        assert not any(arg.name.startswith("mtp.") for arg in loaded(model))
    items = tensors(text_config())
    del items["mtp.fc.weight"]
    refused(folder(tmp_path / "part", items=items), "expected the tensor mtp.fc.weight [32, 64]")


def fp8_items(config: dict[str, object], scale: str = "BF16") -> dict[str, Tensor]:
    """The model with one matrix as block-FP8: 300 rows, so three blocks of rows."""
    items = tensors(config)
    w = np.random.default_rng(5).normal(size=(300, 32)).astype(np.float32)
    codes, scales, _ = reference.encode("fp8", w)
    data = scales.tobytes() if scale == "F32" else ksl_build.bf16(scales)
    items[MATRIX] = ("F8_E4M3", (300, 32), codes.tobytes())
    items[MATRIX + "_scale_inv"] = (scale, (3, 1), data)
    return items


@pytest.mark.parametrize("scale", ["BF16", "F32"])
def test_block_fp8(tmp_path: Path, scale: str) -> None:
    config = text_config(intermediate_size=300)
    items = fp8_items(config, scale)
    path = folder(tmp_path / "m", config, items)
    arg = open_raw(path)[MATRIX]
    assert (arg.encoding, bytes(arg.data)) == (ENC_FP8, items[MATRIX][2])
    assert arg.scales.nbytes == 12
    w = reference.decode("fp8", arg.data, arg.scales, None, 300, 32)
    with open_model(str(path), weights="fp6") as model:
        made = {a.name: a for a in loaded(model)}[MATRIX]
    codes, scales, _ = reference.encode("e2m3", w)
    assert bytes(made.data) == codes.tobytes()
    assert bytes(made.scales) == scales.tobytes()


def test_fp8_mistakes(tmp_path: Path) -> None:
    config = text_config(intermediate_size=300)
    path = folder(tmp_path / "m", config, fp8_items(config))
    items = fp8_items(config)
    del items[MATRIX + "_scale_inv"]
    rewrite(path, items)
    refused(path, "expected its scales", "found none")
    items = fp8_items(config)
    items[MATRIX + "_scale_inv"] = ("BF16", (1, 3), bytes(6))
    rewrite(path, items)
    refused(path, "scales [3, 1], found F8_E4M3 with BF16 [1, 3]")
    items = tensors(config) | {MATRIX + "_scale_inv": ("BF16", (3, 1), bytes(6))}
    rewrite(path, items)
    refused(path, "without an F8_E4M3 tensor")
    norm = "model.norm.weight"
    items = fp8_items(config) | {
        norm: ("F8_E4M3", (32,), bytes(32)), norm + "_scale_inv": ("BF16", (1, 1), bytes(2))
    }  # fmt: skip
    rewrite(path, items)
    refused(path, norm, "found a quantized tensor")
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
    )
    refused(path, "'gptq'")


def test_f32_and_f16(tmp_path: Path) -> None:
    items = tensors(text_config())
    values = np.random.default_rng(2).normal(size=(48, 32))
    half, single = values.astype(np.float16), values.astype(np.float32)
    items[MATRIX] = ("F16", (48, 32), half.tobytes())
    norm = "model.layers.0.linear_attn.norm.weight"
    items[norm] = ("F32", (16,), single[0, :16].tobytes())
    found = open_raw(folder(tmp_path / "m", items=items))
    assert found[MATRIX].encoding == found[norm].encoding == ENC_F32
    assert bytes(found[MATRIX].data) == half.astype(np.float32).tobytes()
    assert bytes(found[norm].data) == single[0, :16].tobytes()


@pytest.mark.parametrize("pad", range(5))
def test_any_start_of_the_data(tmp_path: Path, pad: int) -> None:
    items = tensors(text_config())
    items["model.layers.0.linear_attn.A_log"] = ("F32", (2,), bytes(8))
    path = folder(tmp_path / "m", items=items)
    (path / "model.safetensors").write_bytes(ksl_build.safetensors(items, pad=pad))
    for arg in open_raw(path).values():
        assert bytes(arg.data) == items[arg.name][2]
        unit = 4 if arg.encoding == ENC_F32 else 2
        assert arg.data.ctypes.data % unit == 0


def test_wrong_tensors_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    good = tensors(text_config())

    def expect(change: dict[str, Tensor], *parts: str) -> None:
        rewrite(path, good | change)
        refused(path, *parts)

    expect({MATRIX: ("BF16", (32, 48), good[MATRIX][2])}, MATRIX, "[48, 32], found [32, 48]")
    expect({MATRIX: ("BF16", (48, 2, 16), good[MATRIX][2])}, MATRIX, "one or two dimensions")
    expect({MATRIX: ("U8", (48, 64), good[MATRIX][2])}, MATRIX, "found U8")
    expect({"model.norm.bias": ("BF16", (32,), bytes(64))}, "'model.norm.bias'")
    expect({"mtp.norm.bias": ("BF16", (32,), bytes(64))}, "'mtp.norm.bias'")
    twice = {"model.language_model.norm.weight": good["model.norm.weight"]}
    expect(twice, "'model.norm.weight' is there twice")
    expect({"model.layers.9.input_layernorm.weight": ("BF16", (32,), bytes(64))}, "layers.9")
    rewrite(path, {n: t for n, t in good.items() if n != MATRIX})
    refused(path, f"expected the tensor {MATRIX} [48, 32]")


def test_wrong_text_files_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    for name, data, part in [
        ("tokenizer.json", b"{", "expected JSON"),
        ("tokenizer.json", ksl_build.tokenizer(65), "ids up to 64, but the embedding has 64 rows"),
        ("chat_template.jinja", b"\xff", "expected UTF-8"),
        ("generation_config.json", b'{"top_p": 7}', "top_p"),
        ("generation_config.json", b"[]", "expected a JSON object"),
        ("config.json", b'{"a": 1, "a": 2}', "twice"),
    ]:
        saved = (path / name).read_bytes() if (path / name).exists() else None
        (path / name).write_bytes(data)
        refused(path, name.split(".")[0], part)
        (path / name).unlink()
        if saved is not None:
            (path / name).write_bytes(saved)
    (path / "tokenizer.json").mkdir()
    refused(path, "regular file")


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    items = tensors(text_config())
    data = bytearray(items[MATRIX][2])
    data[64 * 5 : 64 * 5 + 2] = b"\x80\x7f"  # infinity in row 5
    items[MATRIX] = ("BF16", (48, 32), bytes(data))
    path = folder(tmp_path / "m", items=items)
    with (
        open_model(str(path), weights="nvfp4") as model,
        pytest.raises(ModelFileError, match=f"{MATRIX}: expected finite values.* in row 5"),
    ):
        loaded(model)


def test_index_lies(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    ksl_build.shard(path)
    index = path / "model.safetensors.index.json"
    table = json.loads(index.read_text())

    def expect(weight_map: object, *parts: str) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(path, *parts)

    good = table["weight_map"]
    expect(None, "expected weight_map")
    expect(good | {MATRIX: "../m/part-0.safetensors"}, "expected a file name")
    expect(good | {MATRIX: 3}, "expected a file name")
    expect(good | {MATRIX: ""}, "expected a file name")
    expect(good | {MATRIX: "gone.safetensors"}, "No such file", "names it")
    other = "part-1.safetensors" if good[MATRIX] == "part-0.safetensors" else "part-0.safetensors"
    expect(good | {MATRIX: other}, "has no such tensor")
    expect({n: s for n, s in good.items() if n != MATRIX}, f"expected the tensor {MATRIX}")
    index.write_text("{")
    refused(path, "expected JSON")
    (path / "part-0.safetensors").write_bytes(b"")
    index.write_text(json.dumps(table))
    refused(path, "too short")


def test_folders_that_are_none(tmp_path: Path) -> None:
    refused(tmp_path, "config.json", "No such file")
    (tmp_path / "config.json").write_text(json.dumps(text_config()))
    refused(tmp_path, "expected model.safetensors or model.safetensors.index.json")
    os.symlink(tmp_path / "model.safetensors", tmp_path / "model.safetensors")
    refused(tmp_path, "symbolic links")


def test_model_dir_replaces_text_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "tokenizer.json").write_bytes(ksl_build.tokenizer(50))
    (texts / "config.json").write_text("not read")
    with open_model(str(path), weights="bf16", model_dir=str(texts)) as model:
        assert model.spec.token_limit == 50
    with pytest.raises(ModelFileError, match="--model-dir"):
        open_model(str(path), model_dir=str(tmp_path / "none"))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cut=st.integers(0, 10**9), name=st.sampled_from(["config.json", "model.safetensors"]))
def test_truncated_anywhere(tmp_path_factory: pytest.TempPathFactory, cut: int, name: str) -> None:
    path = folder(tmp_path_factory.mktemp("t") / "m")
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[: cut % len(whole)])
    refused(path, name)


def test_quantized_tensors_match_the_reference(tmp_path: Path) -> None:
    config = text_config(intermediate_size=304, hidden_size=144, tie_word_embeddings=False)
    items = tensors(config)
    path = folder(tmp_path / "m", config, items)
    for weights, encoding in (("fp6", "e2m3"), ("nvfp4", "nvfp4")):
        heard: list[str] = []
        with open_model(str(path), weights=weights, progress=heard.append) as model:
            arg = {a.name: a for a in loaded(model)}[MATRIX]
        assert MATRIX in heard
        assert "model.norm.weight" not in heard
        raw = np.frombuffer(items[MATRIX][2], np.uint16).astype(np.uint32) << 16
        codes, scales, globals_ = reference.encode(encoding, raw.view(np.float32).reshape(304, 144))
        assert bytes(arg.data) == codes.tobytes()
        assert bytes(arg.scales) == scales.tobytes()
        assert (arg.globals_ is None) == (globals_ is None)
        if globals_ is not None:
            assert bytes(arg.globals_) == globals_.tobytes()


def test_chunks_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = text_config(intermediate_size=300)
    path = folder(tmp_path / "m", config, fp8_items(config))
    found = []
    for limit in (1 << 22, 1):
        monkeypatch.setattr("kslserve.ksl.quantize.CHUNK_ELEMENTS", limit)
        with open_model(str(path), weights="nvfp4") as model:
            arg = {a.name: a for a in loaded(model)}[MATRIX]
        found.append([bytes(b) for b in (arg.data, arg.scales, arg.globals_)])
    assert found[0] == found[1]
    sizes = codecs.encoding_sizes(codecs.ENC_NVFP4, 300, 32)
    assert tuple(len(b) for b in found[0]) == sizes
