"""Request bodies of the Completions dialect, and the dialect itself: text goes on where a prompt
ends, without a template. Prompts are texts, token ids, or lists of either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from kslserve.api.chat_encode import new_call_id
from kslserve.api.completions_encode import CompletionsCollector, CompletionsEncoder
from kslserve.api.dialect import Dialect, Parsed, openai_error
from kslserve.api.fields import Fields, load_object, noun
from kslserve.api.options import priority_of, sampling_of, statistics_of, stop_of
from kslserve.core.request import Request
from kslserve.core.sampling import TOP_LOGPROBS_MAX, SamplingParams
from kslserve.errors import InvalidRequest, KslError, UnsupportedParameter
from kslserve.http.message import Response
from kslserve.service.complete import start_completions
from kslserve.service.completion import CompletionOptions, Prompt
from kslserve.service.generation import OnEvents
from kslserve.service.model import ServedModel
from kslserve.service.service import Service

MAX_TOKENS = 16
PROMPTS_MAX = 2048
_ID_MAX = 1 << 31


@dataclass(frozen=True, slots=True)
class CompletionsRequest:
    """request: model, stream, include_usage. return_ids: answer with token ids, too."""

    request: Request
    options: CompletionOptions
    return_ids: bool


def parse(body: bytes | dict[str, Any], defaults: SamplingParams) -> CompletionsRequest:
    """The request of a body. defaults: sampling of fields that the client left out."""
    fields = Fields(body) if isinstance(body, dict) else load_object(body)
    model = fields.required_text("model")
    _refuse_unsupported(fields)
    stream_options = fields.object("stream_options")
    limit = fields.integer("max_tokens", low=0)
    logprobs = fields.integer("logprobs", low=0, high=TOP_LOGPROBS_MAX)
    request = Request(
        model=model,
        messages=(),
        stream=fields.boolean("stream") or False,
        include_usage=stream_options is not None
        and (stream_options.boolean("include_usage") or False),
    )
    options = CompletionOptions(
        prompts=_prompts(fields),
        max_tokens=MAX_TOKENS if limit is None else limit,
        sampling=sampling_of(fields, defaults, logprobs=logprobs),
        echo=fields.boolean("echo") or False,
        stop=stop_of(fields),
        ignore_eos=fields.boolean("ignore_eos") or False,
        priority=priority_of(fields),
        statistics=statistics_of(fields),
    )
    return CompletionsRequest(request, options, fields.boolean("return_token_ids") or False)


def _parsed(body: bytes, model: ServedModel) -> Parsed:
    found = parse(body, model.defaults)

    async def start(service: Service, on_events: OnEvents) -> Any:
        return await start_completions(service, found.options, on_events)

    encoding = {
        "include_usage": found.request.include_usage,
        "logprobs": found.options.sampling.logprobs is not None,
        "return_ids": found.return_ids,
    }
    name = found.request.model
    return Parsed(
        found.request,
        encoder=partial(CompletionsEncoder, name, model.fingerprint, **encoding),
        collector=partial(
            CompletionsCollector,
            name,
            model.fingerprint,
            len(found.options.prompts),
            logprobs=encoding["logprobs"],
            return_ids=found.return_ids,
        ),
        start=start,
    )


def _error_response(error: KslError, request_id: str) -> Response:
    """Faults of the conversation as a whole are those of `prompt` here."""
    if error.param == "messages":
        error.param = "prompt"
    return openai_error(error, request_id)


DIALECT = Dialect("completions", _parsed, _error_response, new_call_id)


def _refuse_unsupported(body: Fields) -> None:
    """Known fields that ask for something this server cannot do."""
    for name in ("n", "best_of"):
        if (body.integer(name, low=1) or 1) > 1:
            raise UnsupportedParameter(f"{name} must be 1: one choice per prompt.", param=name)
    if body.text("suffix"):
        raise UnsupportedParameter("suffix is not supported.", param="suffix")


def _prompts(body: Fields) -> tuple[Prompt, ...]:
    value = body.raw("prompt")
    if value is None:
        body.refuse("prompt", "is required")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        body.refuse("prompt", f"must be a string or a list, not {noun(value)}")
    if not value:
        body.refuse("prompt", "must not be empty")
    if type(value[0]) is int:
        return (_ids(value, "prompt"),)
    if len(value) > PROMPTS_MAX:
        body.refuse("prompt", f"takes at most {PROMPTS_MAX} prompts")
    return tuple(_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))


def _prompt(item: object, path: str) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return _ids(item, path)
    raise InvalidRequest(
        f"{path} must be a string or a list of token ids, not {noun(item)}.", param=path
    )


def _ids(items: list[object], path: str) -> list[int]:
    for index, item in enumerate(items):
        if type(item) is not int or not 0 <= item < _ID_MAX:
            at = f"{path}[{index}]"
            raise InvalidRequest(f"{at} must be a token id.", param=at)
    return cast(list[int], items)
