"""Requests captured from coding clients, and what the server makes of their prompts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from kslserve.service.prepare import Prepared
from tests.server.api_cases import request_of
from tests.server.serving import Server

CLIENTS = Path(__file__).resolve().parents[1] / "data/clients"


def capture_names(start: str, part: str) -> list[str]:
    """Names of the captures that begin with one text or contain the other."""
    return sorted(
        path.name.removesuffix(".json.gz")
        for path in CLIENTS.iterdir()
        if path.name.startswith(start) or part in path.name
    )


def captured(name: str) -> list[dict[str, Any]]:
    """The requests of one capture, in order: path, body and more."""
    data = gzip.decompress((CLIENTS / f"{name}.json.gz").read_bytes())
    requests: list[dict[str, Any]] = json.loads(data)["requests"]
    return requests


def prepared(server: Server, dialect: str, body: dict[str, Any]) -> Prepared:
    """The prompt of a body in a dialect, made by a running server's own preparer."""
    service = server.app.state.service
    assert service is not None
    request = request_of(dialect, json.dumps(body).encode(), service.model)
    return service.preparer.prepare_now(request)
