"""The HTTP cases against the HTTP layer alone, with small handlers in place of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.runners.files import named
from tests.runners.http_layer import run_http

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.mark.parametrize("loop_name", LOOPS)
@pytest.mark.parametrize("case", named("http"), ids=lambda case: case["id"])
def test_case(case: dict[str, Any], loop_name: str) -> None:
    def start(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[loop_name]) as runner:
            runner.run(coroutine)

    start(run_http(case))


def test_a_case_that_does_not_hold_fails() -> None:
    """The runner notices: a wrong status, a response too many, a connection that stays open."""
    ok = {"send": "GET /healthz HTTP/1.1\r\nHost: ${HOST}\r\n\r\n"}
    wrong: list[list[dict[str, Any]]] = [
        [ok, {"expect_status": [404]}],
        [ok, {"expect_status": [200], "no_body": True}],
        [ok, {"expect_closed": True, "within_ms": 100}],
        [ok, {"expect_status": [200], "body_contains": "absent"}],
        [ok, {"expect_contains": "absent", "within_ms": 100}],
        [ok, {"expect_status": [200]}, {"expect_status": [200], "within_ms": 100}],
        [ok, {"expect_status": [200]}, {"gauge": "connections_open", "op": "eq", "value": 7}],
    ]
    for steps in wrong:
        with pytest.raises(AssertionError):
            asyncio.run(run_http({"id": "wrong", "steps": steps}))
