from __future__ import annotations

import pytest

from kslserve.engine.codecs import ENC_BF16, ENC_E2M3, ENC_NVFP4, encoding_sizes
from kslserve.engine.model import FILL_CONSTANT, FILL_UNIFORM
from kslserve.errors import ModelFileError
from kslserve.ksl.layout import EMBEDDING, HEAD
from kslserve.ksl.open import open_model
from kslserve.ksl.synth import SHAPES
from tests.unit.ksl.ksl_build import loaded


@pytest.mark.parametrize(
    ("shape", "weights", "tied"),
    # weights of trunk, MTP, embedding and an untied head
    [("27b", 27_320_697_856, False), ("0.8b", None, True), ("4b", None, True), ("9b", None, False)],
)
def test_published_shapes(shape: str, weights: int | None, tied: bool) -> None:
    with open_model(f"synth:{shape}", weights="bf16") as model:
        names = {arg.name for arg in loaded(model)}
        assert (HEAD not in names) == tied
        assert all(arg.data is None and arg.fill is not None for arg in loaded(model))
        if weights is not None:
            assert sum(arg.rows * arg.cols for arg in loaded(model)) == weights
        assert model.spec.vocab == 248320
        assert model.spec.token_limit == 8192
        assert model.tokenizer_json is not None
        assert model.generation.eos_ids == (8168, 8166)


def test_encodings_follow_the_policy() -> None:
    with open_model("synth:0.8b", weights="nvfp4") as model:
        by_name = {arg.name: arg for arg in loaded(model)}
        assert (model.weights, model.head) == ("nvfp4", "fp6")
    assert by_name["model.layers.0.mlp.up_proj.weight"].encoding == ENC_NVFP4
    assert by_name["mtp.fc.weight"].encoding == ENC_E2M3
    assert by_name[EMBEDDING].encoding == ENC_BF16
    assert by_name[HEAD].encoding == ENC_E2M3
    # the copy for the head has the embedding's values
    assert by_name[HEAD].fill == by_name[EMBEDDING].fill
    for arg in by_name.values():
        assert encoding_sizes(arg.encoding, arg.rows, arg.cols)[0] > 0


def test_fills_make_a_neutral_model() -> None:
    with open_model("synth:test") as model:
        by_name = {arg.name: arg.fill for arg in loaded(model)}
        seeds = [f.seed for n, f in by_name.items() if f and f.kind == FILL_UNIFORM and n != HEAD]
    assert len(set(seeds)) == len(seeds)
    norm, gain = by_name["model.norm.weight"], by_name["model.layers.0.linear_attn.norm.weight"]
    assert norm is not None
    assert gain is not None
    assert (norm.kind, norm.scale, gain.scale) == (FILL_CONSTANT, 0.0, 1.0)


def test_unknown_shapes_are_refused() -> None:
    assert set(SHAPES) == {"27b", "9b", "4b", "0.8b"}
    for name in ("synth:", "synth:7b", "synth:\n"):
        with pytest.raises(ModelFileError, match="expected one of synth:27b"):
            open_model(name)
