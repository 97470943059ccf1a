"""GET /v1/models and /v1/models/{id}: one object that satisfies both vendors' libraries."""

from __future__ import annotations

import datetime
from typing import Any

import orjson

from kslserve.errors import NotFound
from kslserve.service.model import ServedModel

OUTPUT_MAX = 32768


def model_object(model: ServedModel) -> dict[str, Any]:
    created = datetime.datetime.fromtimestamp(model.created, datetime.UTC)
    return {
        "id": model.name,
        "object": "model",
        "type": "model",
        "created": model.created,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "owned_by": "ksl",
        "lifecycle": "active",
        "display_name": model.name,
        "max_input_tokens": model.context,
        "max_tokens": min(model.context, OUTPUT_MAX),
        "context_length": model.context,
        "max_model_len": model.context,
    }


def list_body(model: ServedModel) -> bytes:
    return orjson.dumps(
        {
            "object": "list",
            "data": [model_object(model)],
            "has_more": False,
            "first_id": model.name,
            "last_id": model.name,
        }
    )


def one_body(model: ServedModel, name: str) -> bytes:
    """Raises NotFound for another name: a look-up, unlike a request, asks what is really there."""
    if name != model.name:
        raise NotFound(f"The model {name!r} does not exist; this server has {model.name!r}.")
    return orjson.dumps(model_object(model))
