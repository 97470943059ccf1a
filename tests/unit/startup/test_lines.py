"""The start message."""

from __future__ import annotations

from kslserve.core.sampling import SamplingParams
from kslserve.engine.equality import Closeness, Equality
from kslserve.engine.types import EngineInfo
from kslserve.ksl.open import open_model
from kslserve.service.model import ServedModel
from kslserve.startup.lines import describe, describe_equality

NOTE = "the kernels for sm_120 have been compiled and emulated, not run"


def info(note: str) -> EngineInfo:
    return EngineInfo(
        name="cuda", vocab=8192, hidden=256, layers=8, slots=4, slabs=8, blocks=64,
        block_tokens=32, blocks_per_slot=16, wave_columns=64, ring_depth=2, has_mtp=True, note=note,
    )  # fmt: skip


def test_what_an_engine_says_of_itself_is_a_note_before_the_others() -> None:
    served = ServedModel("nano", 512, SamplingParams(), "f", (0,), 8192, 0)
    with open_model("ksl-nano", weights="fp6") as model:
        lines = describe(model, info(NOTE), served, "1", ["another"], None)
        assert lines[-2:] == [f"note      {NOTE}", "note      another"]
        silent = describe(model, info(""), served, "1", [], None)
        assert not any(line.startswith("note") for line in silent)


def test_how_far_results_depend_on_how_they_are_computed() -> None:
    every = "chunked, batch, adopted prompt, adopted generation, speculation"
    assert describe_equality(Equality()) == f"{every}: bit"
    far = Closeness(0.02, 0.001)
    mixed = Equality(far, far, far, far, columns=64, row=63)
    assert describe_equality(mixed) == (
        "chunked, batch, adopted prompt, adopted generation: tolerance: logits within 0.02, KL "
        "0.001; speculation: bit; all bit among waves of at most 64 columns, rows of at most 63"
    )
    assert mixed.texts() == {
        **dict.fromkeys(
            ("chunked", "batch", "adopted_prompt", "adopted_generation"),
            "tolerance: logits within 0.02, KL 0.001",
        ),
        "speculation": "bit",
        "bit_within": "waves of at most 64 columns, rows of at most 63",
    }
