"""The exception tree. Raised where a fault is detected, translated to a wire dialect once, in api/.

Every class carries `code` (machine name), `status` (HTTP), `retryable` and, where one request field
is to blame, `param` (its path, such as `messages[3].content`). `str(error)` is one sentence for a
person.
"""

from __future__ import annotations


class KslError(Exception):
    """Base of every error this package raises on purpose."""

    code = "internal_error"
    status = 500
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: int | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class UsageError(KslError):
    """A bad flag, setting or file named by one; the process prints it and exits with status 2."""

    code = "usage"


class ModelFileError(UsageError):
    """A model file that cannot be read: what was expected, what was found, at which byte."""

    code = "model_file"


class InvalidRequest(KslError):
    """A request field is missing, has a wrong type or an impossible value."""

    code = "invalid_request"
    status = 400


class UnsupportedParameter(InvalidRequest):
    """A field that we know and do not support, and must not ignore silently."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit the window. Each dialect has its own exact text."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, limit_tokens: int):
        super().__init__(
            f"This model's maximum context length is {limit_tokens} tokens. However, your messages "
            f"resulted in {prompt_tokens} tokens. The prompt is too long: {prompt_tokens} tokens > "
            f"{limit_tokens} maximum.",
            param="messages",
        )
        self.prompt_tokens = prompt_tokens
        self.limit_tokens = limit_tokens


class InvalidApiKey(KslError):
    code = "invalid_api_key"
    status = 401


class OriginNotAllowed(KslError):
    code = "origin_not_allowed"
    status = 403


class NotFound(KslError):
    code = "not_found"
    status = 404


class MethodNotAllowed(KslError):
    code = "method_not_allowed"
    status = 405


class RequestTimeout(KslError):
    """The upload stalled."""

    code = "request_timeout"
    status = 408
    retryable = True


class BodyTooLarge(KslError):
    code = "request_too_large"
    status = 413


class UnknownHost(KslError):
    code = "unknown_host"
    status = 421


class HeadTooLarge(KslError):
    code = "request_head_too_large"
    status = 431


class QueueFull(KslError):
    code = "rate_limit_exceeded"
    status = 429
    retryable = True


class EngineError(KslError):
    """The engine refused or failed; the text is its own."""

    code = "internal_error"
    status = 500


class EnginePoisoned(EngineError):
    """A fatal engine error: nothing can run until the process restarts."""

    code = "unavailable"
    status = 503
    retryable = True


class BadLogits(EngineError):
    """The model produced NaN, or nothing was left to sample from."""


class Unavailable(KslError):
    """Starting, draining, or queued too long."""

    code = "unavailable"
    status = 503
    retryable = True


class RequestExpired(KslError):
    """Older than the request limit."""

    code = "request_timeout"
    status = 504
    retryable = True
