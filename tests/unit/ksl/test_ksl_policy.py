from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kslserve.engine.codecs import ENC_BF16, ENC_E2M3, ENC_NVFP4
from kslserve.errors import ModelFileError
from kslserve.ksl import policy
from kslserve.ksl.layout import HEAD, role
from kslserve.ksl.model import Source
from kslserve.ksl.source import open_folder
from tests.unit.ksl.ksl_build import folder, text_config

MLP = "model.layers.0.mlp.down_proj.weight"
LINEAR = "model.layers.0.linear_attn.in_proj_qkv.weight"
FULL = "model.layers.3.self_attn.o_proj.weight"
MTP = "mtp.layers.0.mlp.up_proj.weight"
FC = "mtp.fc.weight"


def source_of(tmp_path: Path, **changes: Any) -> Source:
    return open_folder(str(folder(tmp_path / "m", text_config(**changes))))


def encodings(source: Source, weights: str, head: str = "auto") -> dict[str, int]:
    return {t.name: t.encoding for t in policy.plan(source, weights, head).tensors}


@pytest.mark.parametrize(
    ("weights", "mlp", "projection", "mtp", "head"),
    [
        ("fp6", ENC_E2M3, ENC_E2M3, ENC_E2M3, ENC_E2M3),
        ("auto", ENC_E2M3, ENC_E2M3, ENC_E2M3, ENC_E2M3),
        ("nvfp4", ENC_NVFP4, ENC_NVFP4, ENC_E2M3, ENC_E2M3),
        ("nvfp4-mlp", ENC_NVFP4, ENC_E2M3, ENC_E2M3, ENC_E2M3),
        ("bf16", ENC_BF16, ENC_BF16, ENC_BF16, None),
    ],
)
def test_the_table(
    tmp_path: Path, weights: str, mlp: int, projection: int, mtp: int, head: int | None
) -> None:
    source = source_of(tmp_path)
    found = encodings(source, weights)
    assert found[MLP] == mlp
    assert found[LINEAR] == found[FULL] == projection
    assert found[MTP] == found[FC] == mtp
    assert found.get(HEAD) == head
    for name, encoding in found.items():
        if role(name) is None:
            assert encoding == ENC_BF16
    plan = policy.plan(source, weights)
    assert plan.weights == ("fp6" if weights == "auto" else weights)
    assert plan.head == ("bf16" if head is None else "fp6")
    assert plan.notes == ()
    source.close()


def test_what_is_never_quantized(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    plain = {name.split(".", 3)[-1] for name in encodings(source, "fp6") if role(name) is None}
    assert "linear_attn.conv1d.weight" in plain
    assert {"linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"} <= plain
    assert {"linear_attn.A_log", "linear_attn.dt_bias", "self_attn.q_norm.weight"} <= plain
    assert role("model.embed_tokens.weight") is None
    assert role("mtp.norm.weight") is None
    source.close()


@pytest.mark.parametrize("tied", [True, False])
def test_heads(tmp_path: Path, tied: bool) -> None:
    source = source_of(tmp_path, tie_word_embeddings=tied)
    assert encodings(source, "fp6", "nvfp4")[HEAD] == ENC_NVFP4
    assert encodings(source, "bf16", "fp6")[HEAD] == ENC_E2M3
    assert encodings(source, "nvfp4", "bf16").get(HEAD) == (None if tied else ENC_BF16)
    origin = {t.name: t.origin for t in policy.plan(source, "fp6").tensors}[HEAD]
    assert origin == ("model.embed_tokens.weight" if tied else HEAD)
    source.close()


def test_columns_that_do_not_fit_stay_as_they_are(tmp_path: Path) -> None:
    source = source_of(tmp_path, intermediate_size=36, hidden_size=30)
    plan = policy.plan(source, "nvfp4")
    found = {t.name: t.encoding for t in plan.tensors}
    assert found[MLP] == ENC_BF16  # 36 columns
    assert found[LINEAR] == ENC_BF16  # 30 columns
    assert found[FULL] == ENC_NVFP4  # 32 columns
    assert HEAD not in found
    assert plan.head == "bf16"
    assert f"{MLP} stays bf16: its 36 columns are no multiple of 16" in plan.notes
    assert encodings(source, "fp6")[MLP] == ENC_E2M3
    source.close()


def test_a_quantized_source_is_not_quantized_again(tmp_path: Path) -> None:
    source = source_of(tmp_path)
    made = policy.plan(source, "fp6").tensors
    source.weights, source.head = "fp6", "fp6"
    for planned in made:
        source.stored[planned.name] = policy.Stored(planned.encoding, planned.rows, planned.cols)
    # all as it is
    for weights in ("auto", "fp6"):
        plan = policy.plan(source, weights)
        assert {t.name: t.encoding for t in plan.tensors} == {
            name: item.encoding for name, item in source.stored.items()
        }
        assert all(t.origin == t.name for t in plan.tensors)
        assert (plan.weights, plan.head) == ("fp6", "fp6")
    # the head of a tied model can be made anew from the embedding, or left out
    assert encodings(source, "auto", "nvfp4")[HEAD] == ENC_NVFP4
    assert HEAD not in encodings(source, "auto", "bf16")
    for weights in ("nvfp4", "nvfp4-mlp", "bf16"):
        with pytest.raises(ModelFileError, match="use --weights auto"):
            policy.plan(source, weights)
    source.tied = False
    for head in ("nvfp4", "bf16"):
        with pytest.raises(ModelFileError, match="convert the original model"):
            policy.plan(source, "auto", head)
    source.close()
