"""Error bodies, headers and the models object."""

from __future__ import annotations

import json

import pytest

from kslserve import errors
from kslserve.api import dialect, models
from kslserve.core.sampling import SamplingParams
from kslserve.service.model import ServedModel


@pytest.mark.parametrize(
    ("error", "kind", "code", "status"),
    [
        (errors.InvalidRequest("x", param="a.b"), "invalid_request_error", None, 400),
        (errors.UnsupportedParameter("x"), "invalid_request_error", "unsupported_parameter", 400),
        (errors.InvalidApiKey("x"), "invalid_request_error", "invalid_api_key", 401),
        (errors.OriginNotAllowed("x"), "invalid_request_error", "origin_not_allowed", 403),
        (errors.NotFound("x"), "invalid_request_error", "not_found", 404),
        (errors.RequestTimeout("x"), "invalid_request_error", "request_timeout", 408),
        (errors.BodyTooLarge("x"), "invalid_request_error", "request_too_large", 413),
        (errors.UnknownHost("x"), "invalid_request_error", "unknown_host", 421),
        (errors.QueueFull("x"), "rate_limit_error", "rate_limit_exceeded", 429),
        (errors.KslError("x"), "server_error", "internal_error", 500),
        (errors.Unavailable("x"), "server_error", "unavailable", 503),
        (errors.RequestExpired("x"), "server_error", "request_timeout", 504),
    ],
)
def test_error_table(error: errors.KslError, kind: str, code: str | None, status: int) -> None:
    body = json.loads(dialect.error_body(error))
    assert body == {"error": {"message": "x", "type": kind, "param": error.param, "code": code}}
    assert error.status == status
    assert bool(dialect.error_headers(error)) == (status in (429, 503))


def test_too_long_is_worded_exactly() -> None:
    error = errors.ContextLengthExceeded(213456, 131072)
    assert json.loads(dialect.error_body(error)) == {
        "error": {
            "message": "This model's maximum context length is 131072 tokens. However, your "
            "messages resulted in 213456 tokens. The prompt is too long: 213456 tokens > "
            "131072 maximum.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }


def test_retry_after_is_whole_seconds() -> None:
    error = errors.Unavailable("x", retry_after_s=7)
    assert dialect.error_headers(error) == (("retry-after", "7"),)
    assert dialect.error_headers(errors.QueueFull("x", retry_after_s=0)) == (("retry-after", "1"),)


def test_foreign_errors_keep_their_details() -> None:
    assert "secret" not in str(dialect.as_ksl_error(ValueError("secret")))
    ours = errors.NotFound("x")
    assert dialect.as_ksl_error(ours) is ours


def test_models() -> None:
    model = ServedModel("nano", 262144, SamplingParams(), "fp", (1,), 100, 1_767_225_600)
    body = json.loads(models.list_body(model))
    (entry,) = body["data"]
    assert body["object"] == "list"
    assert body["first_id"] == body["last_id"] == "nano"
    assert body["has_more"] is False
    assert entry == {
        "id": "nano", "object": "model", "type": "model", "created": 1_767_225_600,
        "created_at": "2026-01-01T00:00:00Z", "owned_by": "ksl", "lifecycle": "active",
        "display_name": "nano", "max_input_tokens": 262144, "max_tokens": 32768,
        "context_length": 262144, "max_model_len": 262144,
    }  # fmt: skip
    assert json.loads(models.one_body(model, "nano")) == entry
    with pytest.raises(errors.NotFound):
        models.one_body(model, "gpt-4")
