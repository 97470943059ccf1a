"""Header, sizes and tile order of KSL1 against the published vectors and an independent writer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from kslserve.engine import codecs
from kslserve.engine.codecs import ENC_E2M3
from kslserve.errors import ModelFileError
from kslserve.ksl import ksl1_header as ksl1
from kslserve.ksl.hf_config import read_config
from kslserve.ksl.ksl1_records import records
from kslserve.ksl.ksl1_scales import e4m3_of_e2m3
from kslserve.ksl.ksl1_tiles import from_tiles, to_tiles
from tests.unit.ksl import ksl1_reference as one
from tests.unit.ksl import ksl_reference as reference

CONFIG = Path(__file__).resolve().parents[2] / "data" / "qwen3_8_27b_config.json"


def test_the_published_tile() -> None:
    rows, cols = np.indices((16, 32))
    codes = reference.pack6((7 * rows + cols) % 64)
    tile = to_tiles(codes.reshape(-1), ksl1.FLAG_E2M3, 16, 32).tobytes()
    assert hashlib.sha256(tile).hexdigest() == (
        "60d68f39bd0d216ef37a2b5034cd9ee581d61a0d2c3a951712bbd00bd4e095fc"
    )
    for lane, text in [
        (0, "40200c07922844611c0bd338"),
        (1, "48a22c0f14494ce33c135559"),
        (5, "d685659df781dac675a13892"),
        (31, "facef7813010fe0f04857120"),
    ]:
        assert tile[12 * lane : 12 * lane + 12].hex() == text
    assert from_tiles(np.frombuffer(tile, np.uint8), ksl1.FLAG_E2M3, 16, 32).tobytes() == (
        codes.tobytes()
    )


@pytest.mark.parametrize("flags", [0x100, 0x000, 0x080, 0x040])
@pytest.mark.parametrize("shape", [(16, 32), (48, 96), (128, 160)])
def test_every_order_is_the_described_one(flags: int, shape: tuple[int, int]) -> None:
    most = 64 if flags & ksl1.FLAG_E2M3 else 256
    codes = np.random.default_rng(5).integers(0, most, shape).astype(np.uint8)
    stored = np.frombuffer(one.payload(codes, flags), np.uint8)
    plain = reference.pack6(codes) if flags & ksl1.FLAG_E2M3 else codes
    assert from_tiles(stored, flags, *shape).tobytes() == plain.tobytes()
    assert to_tiles(plain.reshape(-1), flags, *shape).tobytes() == stored.tobytes()


def test_published_codes_of_values() -> None:
    values = [-0.01, 0.0625, 0.0626, 0.1875, 0.9375, 1.0625, 3.875, 5.75, 7.25, 7.5, -7.5, 0]
    expected = [0x20, 0, 1, 1, 0x07, 0x08, 0x17, 0x1B, 0x1E, 0x1F, 0x3F, 0]
    encoded = codecs.encode(ENC_E2M3, np.array([values], np.float32))
    assert reference.unpack6(encoded.codes).tolist() == [expected]
    assert encoded.scales is not None
    assert encoded.scales.tolist() == [[127]]


def test_fp8_holds_every_fp6_value() -> None:
    wider = reference.signed(reference.E4M3, e4m3_of_e2m3().astype(int), 128)
    assert wider.tolist() == reference.signed(reference.E2M3, np.arange(64), 32).tolist()


def test_sizes_of_the_27b() -> None:
    """Every row of the published table."""
    family = read_config(json.loads(CONFIG.read_text()), "config")
    found = records(family.spec, family.tied, mtp=True)
    sizes = {record.name: record.size(one.PRODUCTION) for record in found}
    heads = {
        record.name: (record.rows, record.cols, record.scale_rows, -(-record.cols // 128))
        for record in found
    }
    layer, full = "model.layers.0.", "model.layers.3."
    for name, shape, grid, size in [
        ("model.embed_tokens.weight", (248320, 5120), None, 2_542_796_800),
        ("lm_head.weight", (248320, 5120), (1940, 40), 953_859_208),
        (layer + "mlp.gate_proj.weight", (17408, 5120), (136, 40), 66_868_488),
        (layer + "mlp.up_proj.weight", (17408, 5120), (136, 40), 66_868_488),
        (layer + "mlp.down_proj.weight", (5120, 17408), (40, 136), 66_868_488),
        (full + "self_attn.q_proj.weight", (12288, 5120), (96, 40), 47_201_288),
        (full + "self_attn.k_proj.weight", (1024, 5120), (8, 40), 3_933_448),
        (full + "self_attn.v_proj.weight", (1024, 5120), (8, 40), 3_933_448),
        (full + "self_attn.o_proj.weight", (5120, 6144), (40, 48), 23_600_648),
        (layer + "linear_attn.out_proj.weight", (5120, 6144), (40, 48), 23_600_648),
        (layer + "linear_attn.in_proj_qkv.weight", (10240, 5120), (80, 40), 39_334_408),
        (layer + "linear_attn.in_proj_z.weight", (6144, 5120), (48, 40), 23_600_648),
        (layer + "linear_attn.in_proj_a.weight", (48, 5120), (1, 40), 184_488),
        (layer + "linear_attn.in_proj_b.weight", (48, 5120), (1, 40), 184_488),
    ]:
        assert sizes[name] == size, name
        assert heads[name][:2] == shape
        assert grid is None or heads[name][2:] == grid

    def total(prefix: str) -> int:
        return sum(size for name, size in sizes.items() if name.startswith(prefix))

    assert total(full) == 279_295_800
    assert total(layer) == 287_613_344
    assert total("mtp.") == 849_398_784
    assert sum(sizes.values()) - total("mtp.") == 21_770_839_560
    assert 116 + family.spec.layers + sum(sizes.values()) == 22_620_238_524
    plain = sum(r.size(0x01D) for r in found if not r.name.startswith("mtp."))
    assert round(plain / 1e9, 2) == 28.17


@pytest.mark.parametrize("flags", [one.PRODUCTION, 0x13D, 0x03D, 0x01D])
def test_records_follow_the_described_order(flags: int) -> None:
    model = one.Model()
    header = ksl1.parse(model.header(flags), "x")
    family = read_config(ksl1.config_of(header), "x")
    found = records(family.spec, family.tied, header.has_mtp_section)
    kinds = {"nq": "n", "f32": "f", "q": "q"}
    assert [(r.name, kinds[r.kind], r.rows, r.cols) for r in found] == model.tensors(
        header.has_mtp_section
    )


def test_a_header_is_what_it_was() -> None:
    data = one.Model(tied=True).header(one.PRODUCTION)
    header = ksl1.parse(data, "x")
    assert header.pack() == data
    assert (header.hidden_size, header.layer_types) == (160, (1, 1, 2))
    assert header.block_scaled_e2m3
    assert header.has_mtp_section
    config = ksl1.config_of(header)
    model = one.Model(tied=True).config()
    model["rope_parameters"]["rope_type"] = "default"
    assert config == model  # the floats too: 1e-6 is 1e-6 again


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"signature": b"TQF1"}, "expected the signature KSL1 at byte 0, found TQF1"),
        ({"signature": b"KSL2"}, "expected the signature KSL1 at byte 0, found b'KSL2'"),
        ({"model_family": 2}, "model_family at byte 12 to be 1 (qwen3_5), found 2"),
        ({"header_bytes": 120}, "header_bytes at byte 4 to be 116 + 3 layers, found 120"),
        ({"num_hidden_layers": 0}, "num_hidden_layers at byte 28 to be from 1 to 1024"),
        ({"num_hidden_layers": 1 << 31}, "num_hidden_layers at byte 28"),
        ({"hidden_size": 0}, "hidden_size at byte 20"),
        ({"vocab_size": 0xFFFFFFFF}, "vocab_size at byte 32"),
        ({"linear_conv_kernel_dim": 99}, "linear_conv_kernel_dim at byte 64"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps at byte 72"),
        ({"rope_theta": float("inf")}, "rope_theta at byte 76"),
        ({"partial_rotary_factor": -0.25}, "partial_rotary_factor at byte 80"),
        ({"mrope_interleaved": 3}, "mrope_interleaved at byte 84 to be 0 or 1, found 3"),
        ({"tie_word_embeddings": 2}, "tie_word_embeddings at byte 100"),
        ({"text_only": 0}, "text_only at byte 104 to be 1, found 0"),
        ({"has_mtp": 7}, "has_mtp at byte 112"),
        ({"tie_word_embeddings": 1}, "expected bit 1 to agree with tie_word_embeddings"),
        ({"non_quant_dtype": 1}, "expected bit 2 to agree with non_quant_dtype"),
        ({"flags": 0xD3D}, "expected bits 0 to 10 only, found 0x800 above them"),
        ({"flags": 0x53C}, "expected bit 0"),
        ({"flags": 0x57D}, "at most one of the layout bits 6, 7 and 8"),
        ({"flags": 0x0FD}, "at most one of the layout bits 6, 7 and 8"),
        ({"flags": 0x51D}, "expected bit 5 (block scales) with a layout bit"),
        ({"layers": [1, 3, 2]}, "type of layer 1 at byte 117"),
        ({"layers": [1, 2]}, "expected a header of 119 bytes, found 118"),
    ],
)
def test_headers_that_lie(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        ksl1.parse(one.Model().header(one.PRODUCTION, **changes), "file")
    assert text in caught.value.message
    assert caught.value.message.startswith("file: ")
    assert caught.value.message.endswith(".")


def test_short_headers() -> None:
    data = one.Model().header(one.PRODUCTION)
    for length in range(len(data)):
        with pytest.raises(ModelFileError, match=r"expected a (KSL1 )?header of 11[69] bytes"):
            ksl1.parse(data[:length], "file")
