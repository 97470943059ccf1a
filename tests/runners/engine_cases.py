"""Runs cases of the kind `engine`: requests against fresh servers, and what must hold of their
results.

Every configuration of a case gets a process of its own when a run first names it. Only a case whose
server has to fail inside (`fail_alloc_for`) runs in this process, where that can be arranged.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
import unittest.mock
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kslserve import config
from kslserve.text.tokenizer import Tokenizer
from tests.runners.files import Case
from tests.server.serving import Process, Server, metric_of

WAVE_COLUMNS = 16  # of a scripted server: so many tokens are a chunk of a prompt
TIMEOUT_S = 120
_FLAGS = {
    "kv_tokens": "--kv-tokens",
    "max_context": "--context",
    "speculation": "--speculation",
    "prefix_cache": "--prefix-cache",
    "idle_timeout_s": "--idle-timeout-s",
    "io_timeout_s": "--io-timeout-s",
    "api_key": "--api-key",
}


class Target(Protocol):
    """A running server. trips: stalls that its watchdogs have seen."""

    root: str

    def trips(self) -> int: ...
    def stop(self) -> None: ...


@dataclass
class Result:
    """What one request gave. status 0: it was cancelled or the connection broke."""

    status: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    elapsed_ms: float = 0.0

    @property
    def ids(self) -> list[int]:
        return list(self.body["choices"][0]["token_ids"])

    @property
    def output(self) -> str:
        return str(self.body["choices"][0]["text"])

    @property
    def logprobs(self) -> list[float]:
        return list(self.body["choices"][0]["logprobs"]["token_logprobs"])

    def number(self, name: str) -> float:
        usage = self.body["usage"]
        if name == "cached_tokens":
            return float(usage["prompt_tokens_details"]["cached_tokens"])
        return float(usage[name])


def run_engine(case: Case, folder: Path) -> None:
    run = _Run(case, folder)
    try:
        run.requests()
        run.check()
    finally:
        run.close()


class _Process:
    """A server as a process of its own."""

    def __init__(self, flags: list[str]) -> None:
        self._process = Process(*flags)
        try:
            url = self._process.wait_ready()
        except BaseException:
            self._process.kill()
            raise
        self.root = url.removesuffix("/v1")
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.process.stderr is not None
        self._errors.extend(self._process.process.stderr)

    def trips(self) -> int:
        return sum(" watchdog " in line for line in self._errors)

    def stop(self) -> None:
        process = self._process.process
        process.terminate()
        with contextlib.suppress(Exception):
            process.wait(30)
        if process.poll() is None:
            process.kill()
            process.wait()
        self._reader.join()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


class _Inside:
    """A server in this process, in which the first allocation for a request can fail."""

    def __init__(self) -> None:
        self._server = Server(config.Settings())
        self.root = self._server.root

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """The ids of the next prompt find no memory."""
        encode = Tokenizer.encode_rendered
        failed: list[bool] = []

        def fail_once(tokenizer: Tokenizer, text: Any) -> Any:
            if not failed:
                failed.append(True)
                raise MemoryError
            return encode(tokenizer, text)

        with unittest.mock.patch.object(Tokenizer, "encode_rendered", fail_once):
            yield
        assert failed, "nothing was allocated"

    def trips(self) -> int:
        return int(self._server.metric("watchdog_trips_total"))

    def stop(self) -> None:
        self._server.close()


class _Run:
    def __init__(self, case: Case, folder: Path) -> None:
        self._case = case
        self._folder = folder
        self._servers: dict[int, Target] = {}
        self._results: dict[str, Result] = {}
        self._limits: dict[str, float] = {}
        # A server that stalls does not answer, so nobody waits for it.
        self._stalls = any(check[0] == "not_ready_within_ms" for check in case["expect"])
        self._threads: list[threading.Thread] = []
        self._faults: list[str] = []
        self._suffix = 0
        self._dice = random.Random(case["id"])

    # ------------------------------------------------------------ requests

    def requests(self) -> None:
        for run in self._case["runs"]:
            if "idle_ms" in run:
                time.sleep(run["idle_ms"] / 1000)
                continue
            beside = [self._start(other) for other in run.get("with", ())]
            for _ in range(run.get("times", 1)):
                thread = self._start(run)
                if run.get("async") or self._stalls:
                    self._threads.append(thread)
                    # Requests of later runs come behind it.
                    time.sleep(0.1)
                else:
                    thread.join()
            for thread in beside:
                thread.join()
        if not self._stalls:
            self._join()

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _start(self, run: dict[str, Any]) -> threading.Thread:
        """Send the request of a run in a thread."""
        target = self._target(run["server"])
        body = self._body(run)
        result = self._results[run["as"]] = Result()

        def send() -> None:
            fails = run["as"] in (s.get("fail_alloc_for") for s in self._case["server"])
            inside = target.failing() if fails and isinstance(target, _Inside) else None
            try:
                with inside or contextlib.nullcontext():
                    self._send(target, body, result, run.get("cancel_after_ms"))
            except AssertionError as error:
                self._faults.append(str(error))

        thread = threading.Thread(target=send)
        thread.start()
        if "within_ms" in run:
            self._limits[run["as"]] = run["within_ms"]
        return thread

    def _send(self, target: Target, body: bytes, result: Result, cancel_after: Any) -> None:
        address = urllib.parse.urlsplit(target.root)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=TIMEOUT_S)
        begun = time.monotonic()
        try:
            connection.request(
                "POST", "/v1/completions", body, {"content-type": "application/json"}
            )
            if cancel_after is not None:
                if isinstance(cancel_after, list):
                    cancel_after = self._dice.uniform(*cancel_after)
                time.sleep(cancel_after / 1000)
                return
            response = connection.getresponse()
            data = json.loads(response.read())
            result.status, result.body = response.status, data
        except (OSError, http.client.HTTPException):
            result.status = 0
        finally:
            result.elapsed_ms = (time.monotonic() - begun) * 1000
            connection.close()

    def _body(self, run: dict[str, Any]) -> bytes:
        params = dict(run.get("params", {}))
        if params.pop("logprobs", False):
            params["logprobs"] = params.pop("top_logprobs", 0)
        if "script" in run:
            prompt: Any = [1] * (WAVE_COLUMNS * run["script"].get("prefill_chunks", 1))
            params["max_tokens"] = run["script"].get("tokens", 1)
        else:
            prompt = self._prompt(run["prompt"])
        if run.get("vary_suffix"):
            self._suffix += 1
            prompt += f"# {self._suffix}\n"
        return json.dumps(
            {"model": "any", "prompt": prompt, "return_token_ids": True, **params}
        ).encode()

    def _prompt(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        if "output_of" in prompt:
            before = next(run for run in self._case["runs"] if run.get("as") == prompt["output_of"])
            text = self._prompt(before["prompt"]) + self._results[prompt["output_of"]].output
        else:
            text = prompt["repeat"] * prompt["times"]
        return text + prompt.get("then", "")

    def _target(self, number: int) -> Target:
        if number not in self._servers:
            options = self._case["server"][number]
            if "fail_alloc_for" in options:
                self._servers[number] = _Inside()
            else:
                self._servers[number] = _Process(self._flags(options))
        return self._servers[number]

    def _flags(self, options: dict[str, Any]) -> list[str]:
        flags: list[str] = []
        for name, value in options.items():
            if name == "watchdog_s":
                flags += ["--watchdog-loop-s", str(value), "--watchdog-wave-s", str(value)]
            elif name == "engine":
                if value == "scripted":
                    flags += ["--engine", "scripted", "--script", str(self._script())]
                    flags += ["--wave-columns", str(WAVE_COLUMNS)]
            elif name == "cors_origin":
                flags += [part for origin in value for part in ("--cors-origin", origin)]
            elif isinstance(value, bool):
                flags += [_FLAGS[name] if value else "--no-" + _FLAGS[name].removeprefix("--")]
            else:
                flags += [_FLAGS[name], str(value)]
        return flags

    def _script(self) -> Path:
        """The outputs of all runs in order; the slowest chunk of a prompt is that of all."""
        scripts = [run["script"] for run in self._case["runs"] if "script" in run]
        outputs = [
            {
                "chunks": ["a "] * script.get("tokens", 1),
                "end": "length",
                "first_ms": script.get("stall_ms", script.get("chunk_ms", 0)),
                "delay_ms": script.get("decode_ms", 0),
            }
            for script in scripts
        ]
        path = self._folder / "script.json"
        prompt_ms = max(script.get("chunk_ms", 0) for script in scripts)
        path.write_text(json.dumps({"outputs": outputs, "prompt_ms": prompt_ms}))
        return path

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        assert not self._faults, self._faults
        for name, limit in self._limits.items():
            elapsed = self._results[name].elapsed_ms
            assert elapsed <= limit, f"{name} took {elapsed:.0f} ms, not {limit}"
        for name, *arguments in self._case["expect"]:
            checker: Callable[..., None] | None = getattr(self, "_check_" + name, None)
            assert checker is not None, f"unknown check {name}"
            checker(*arguments)

    def _ok(self, *names: str) -> list[Result]:
        found = [self._results[name] for name in names]
        for name, result in zip(names, found, strict=True):
            assert result.status == 200, f"{name}: status {result.status} {result.body}"
        return found

    def _check_same_output(self, *names: str) -> None:
        first, *others = self._ok(*names)
        for other in others:
            assert other.ids == first.ids, f"{other.output!r} is not {first.output!r}"

    def _check_at_least_distinct(self, names: list[str], least: int) -> None:
        distinct = {tuple(result.ids) for result in self._ok(*names)}
        assert len(distinct) >= least, f"only {len(distinct)} outputs differ"

    def _value(self, path: str) -> float:
        name, _, number = path.partition(".")
        return self._ok(name)[0].number(number)

    def _check_gt(self, left: str, right: Any) -> None:
        value = self._value(left)
        bound = self._value(right) if isinstance(right, str) else right
        assert value > bound, f"{left} is {value}, not more than {bound}"

    def _check_ge_fraction(self, left: str, right: str, fraction: float) -> None:
        value, whole = self._value(left), self._value(right)
        assert value >= fraction * whole, f"{left} is {value}, {right} is {whole}"

    def _check_status_in(self, name: str, allowed: list[int]) -> None:
        result = self._results[name]
        assert result.status in allowed, f"{name}: status {result.status} {result.body}"

    def _check_logprobs_close(self, left: str, right: str, tolerance: float) -> None:
        first, second = self._ok(left, right)
        pairs = list(zip(first.logprobs, second.logprobs, strict=True))
        worst = max(abs(a - b) for a, b in pairs)
        assert worst <= tolerance, f"log-probabilities differ by {worst}"

    def _check_logprobs_not_all_zero(self, name: str) -> None:
        (result,) = self._ok(name)
        assert any(result.logprobs), "all log-probabilities are zero"

    def _check_blocks_free_at_end(self) -> None:
        """No request holds a block: what is not free is the cache's, which gives it back."""

        def free(health: dict[str, Any]) -> bool:
            counts = health["scheduler"]
            used = counts["blocks_total"] - counts["blocks_free"]
            return counts["running"] == counts["queued"] == used == 0

        for target in self._servers.values():
            _until(lambda target=target: free(json.loads(_get(target, "/healthz"))), 10_000)

    def _check_watchdog_trips(self, wanted: int) -> None:
        for target in self._servers.values():
            if wanted:
                _until(lambda target=target: target.trips() >= wanted, 10_000)
            assert target.trips() == wanted, f"{target.trips()} trips"

    def _check_not_ready_within_ms(self, limit: float) -> None:
        for target in self._servers.values():
            _until(lambda target=target: not _is_ready(target), limit)

    def _check_ended_counts_sum_to_started(self) -> None:
        def agree(text: str) -> bool:
            ends = [line for line in text.splitlines() if "generations_ended_total{" in line]
            ended = sum(float(line.rpartition(" ")[2]) for line in ends)
            started = metric_of(text, "generations_started_total")
            return ended == started >= 2

        for target in self._servers.values():
            _until(lambda target=target: agree(_get(target, "/metrics")), 10_000)

    def close(self) -> None:
        for target in self._servers.values():
            target.stop()
        self._join()


def _until(holds: Callable[[], bool], within_ms: float) -> None:
    end = time.monotonic() + within_ms / 1000
    while not holds():
        assert time.monotonic() < end, f"it did not come true within {within_ms:.0f} ms"
        time.sleep(0.05)


def _get(target: Target, path: str) -> str:
    address = urllib.parse.urlsplit(target.root)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise ConnectionError(f"status {response.status}")
        return text
    finally:
        connection.close()


def _is_ready(target: Target) -> bool:
    try:
        _get(target, "/readyz")
    except (OSError, http.client.HTTPException):
        return False
    return True
