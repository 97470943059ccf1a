"""llama.cpp beside the CPU benches, where a `llama-bench` binary or the `xllamacpp` package is
present and a GGUF file of the same shape is given."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

PROMPT_ID = 1000  # ids from here on, all different, so that no prompt shares a prefix


class Peer(Protocol):
    """Tokens per second: of a cold prompt; of `streams` sequences together after a prompt."""

    name: str

    def prefill(self, prompt: int) -> float: ...
    def decode(self, prompt: int, tokens: int, streams: int) -> float | None: ...


def find_peer(model: str, threads: int, context: int, streams: int) -> Peer | None:
    """The peer on this machine; None without a model file or without llama.cpp. context: tokens of
    one sequence."""
    if not model:
        return None
    if shutil.which("llama-bench"):
        return LlamaBench(model, threads)
    if importlib.util.find_spec("xllamacpp"):
        return Xllamacpp(model, threads, context, streams)
    return None


class LlamaBench:
    """The binary measures one stream."""

    name = "llama-bench"

    def __init__(self, model: str, threads: int) -> None:
        self._command = ["llama-bench", "-m", model, "-t", str(threads), "-o", "json"]

    def _run(self, *arguments: str) -> float:
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, check=True
        )
        return float(json.loads(done.stdout)[0]["avg_ts"])

    def prefill(self, prompt: int) -> float:
        return self._run("-p", str(prompt), "-n", "0", "-r", "3")

    def decode(self, prompt: int, tokens: int, streams: int) -> float | None:
        if streams > 1:
            return None
        return self._run("-p", "0", "-n", str(tokens), "-d", str(prompt), "-r", "3")


class Xllamacpp:
    """llama.cpp's server, in this process."""

    name = "xllamacpp"

    def __init__(self, model: str, threads: int, context: int, streams: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx = context * streams
        params.n_parallel = streams
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_prompt = False
        params.verbosity = 0
        params.port = 0
        self._server = xllamacpp.Server(params)
        self._salt = 0

    def _ask(self, prompt: int, tokens: int) -> dict[str, Any]:
        self._salt += 1
        ids = [PROMPT_ID + (self._salt * 97 + i) % 50000 for i in range(prompt)]
        body = {
            "prompt": ids, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False,
            "temperature": 0.0,
        }  # fmt: skip
        answer = self._server.handle_completions(body)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        if "timings" not in answer:
            raise SystemExit(f"llama.cpp does not answer: {answer}")
        timings: dict[str, Any] = answer["timings"]
        return timings

    def prefill(self, prompt: int) -> float:
        rounds = 3 if prompt <= 1024 else 1
        rates = [self._ask(prompt, 1)["prompt_per_second"] for _ in range(rounds)]
        return statistics.median(rates)

    def decode(self, prompt: int, tokens: int, streams: int) -> float | None:
        if streams == 1:
            return float(self._ask(prompt, tokens)["predicted_per_second"])
        with ThreadPoolExecutor(streams) as pool:
            start = time.perf_counter()
            timings = list(pool.map(lambda _: self._ask(prompt, tokens), range(streams)))
            wall = time.perf_counter() - start
        # All prompts first, then all streams together: what is left is decoding.
        prompts = max(t["prompt_ms"] for t in timings) / 1e3
        return streams * tokens / (wall - prompts) if wall > prompts else None
