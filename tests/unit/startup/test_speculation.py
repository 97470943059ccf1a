"""The settings of drafts: what each mode means, and that each setting gets to where it counts."""

from __future__ import annotations

from typing import Any

import pytest

from kslserve.config import Settings
from kslserve.engine.native import NativeEngine
from kslserve.errors import UsageError
from kslserve.sched.spec.policy import SpecPolicy
from kslserve.startup.backend import open_backend
from kslserve.startup.speculation import spec_policy


@pytest.mark.parametrize(
    ("mode", "has_mtp", "kinds"),
    [
        ("off", True, None),
        ("ngram", True, (True, False)),
        ("mtp", True, (False, True)),
        ("auto", True, (True, True)),
        ("auto", False, (True, False)),
        ("ngram", False, (True, False)),
    ],
)
def test_modes(mode: str, has_mtp: bool, kinds: tuple[bool, bool] | None) -> None:
    found = spec_policy(Settings(speculation=mode, draft_depth=3, draft_lanes=9), has_mtp)
    if kinds is None:
        assert found is None
    else:
        ngram, mtp = kinds
        assert found == SpecPolicy(ngram=ngram, mtp=mtp, depth=3, lanes=9)


def test_modes_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="--speculation mtp needs a model with an MTP head"):
        spec_policy(Settings(speculation="mtp"), False)
    # What answers from a script drafts only when told to.
    scripted = Settings(engine="scripted", script="s.json")
    assert spec_policy(scripted, False) is None


def test_margin_and_vocabulary_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    opened = NativeEngine.open

    def open_noted(*args: Any, **options: Any) -> NativeEngine:
        asked.update(options)
        return opened(*args, **options)

    monkeypatch.setattr(NativeEngine, "open", open_noted)
    settings = Settings(kv_tokens=256, max_seqs=1, draft_margin=0.75, draft_vocab=300)
    open_backend(settings, print).engine.close()
    assert (asked["draft_margin"], asked["draft_vocab"]) == (0.75, 300)
