"""Error bodies and headers, in one place. An error is made where it is detected and gets its wire
form here."""

from __future__ import annotations

import orjson

from kslserve.errors import InvalidRequest, KslError

_RETRY_AFTER_S = 1
Headers = tuple[tuple[str, str], ...]


def error_type(error: KslError) -> str:
    if error.status == 429:
        return "rate_limit_error"
    return "server_error" if error.status >= 500 else "invalid_request_error"


def error_body(error: KslError) -> bytes:
    """The body of an OpenAI dialect. A plain bad field has no code beyond its type."""
    code = None if error.code == InvalidRequest.code else error.code
    return orjson.dumps(
        {
            "error": {
                "message": str(error),
                "type": error_type(error),
                "param": error.param,
                "code": code,
            }
        }
    )


def error_headers(error: KslError) -> Headers:
    """`retry-after` in whole seconds where repeating the request makes sense."""
    if error.status not in (429, 503):
        return ()
    seconds = _RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    return (("retry-after", str(max(seconds, 1))),)


def as_ksl_error(error: BaseException) -> KslError:
    """An error for a client: ours as it is, anything else without its details."""
    if isinstance(error, KslError):
        return error
    return KslError("The server failed to answer this request; its log has the details.")
