"""The drafters that the settings and the model allow."""

from __future__ import annotations

import dataclasses

from kslserve.config import Settings
from kslserve.errors import UsageError
from kslserve.ksl.model import ModelFile
from kslserve.sched.spec.policy import SpecPolicy


def leave_unused_head(settings: Settings, model: ModelFile) -> None:
    """Take the MTP head off a model that nothing will draft with: it would be read and held, have
    keys and values of its own, and follow every wave with them."""
    if settings.speculation in ("off", "ngram"):
        leave_head(model)


def leave_head(model: ModelFile) -> None:
    """Take the MTP head off a model that has one."""
    model.spec = dataclasses.replace(model.spec, mtp_layers=0)
    model.tensors = [t for t in model.tensors if not t.name.startswith("mtp.")]


def spec_policy(settings: Settings, has_mtp: bool) -> SpecPolicy | None:
    """None where nothing is drafted. `auto` uses what there is; engines without a model draft only
    when told to. Raises UsageError where MTP drafts are asked for and the model has no MTP head."""
    mode = settings.speculation
    if mode == "auto" and settings.engine != "native":
        mode = "off"
    if mode == "off":
        return None
    if mode == "mtp" and not has_mtp:
        raise UsageError(
            "--speculation mtp needs a model with an MTP head; auto and ngram work without."
        )
    return SpecPolicy(
        ngram=mode != "mtp",
        mtp=mode != "ngram" and has_mtp,
        depth=settings.draft_depth,
        lanes=settings.draft_lanes,
    )
