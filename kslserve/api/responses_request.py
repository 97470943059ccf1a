"""ResponsesRequest: a core.Request with what a Responses answer repeats and needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kslserve.api.responses_tools import ToolTable
from kslserve.core.request import Request


@dataclass(slots=True)
class ResponsesRequest(Request):
    """table: the tools by the names that the model knows. echo: fields of the response object that
    repeat the request. dropped: types of input items that were left out."""

    table: ToolTable = field(default_factory=ToolTable)
    echo: dict[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
