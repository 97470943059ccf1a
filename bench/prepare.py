"""From a request's bytes to token ids: parse, render and tokenize, for requests of real clients.

    python -m bench.prepare [--template 3.5] [--repeat 7] [--save]

Cold is the first of the last two requests of a file, seen by a new server; warm is the second one
after it (a lone request is sent twice). A client that compacts its history starts anew, so that its
second request is cold too. The limit of the same run is reading the body's JSON and nothing else:
`ratio` is warm over that.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from bench.report import ROOT, Report
from kslserve.api import chat, responses
from kslserve.api.dialect import Dialect
from kslserve.api.messages import Messages
from kslserve.api.messages_parse import DefaultThinking
from kslserve.core.sampling import SamplingParams
from kslserve.errors import KslError
from kslserve.ksl.open import bundled_path, open_model
from kslserve.metrics import Metrics
from kslserve.service.model import ServedModel
from kslserve.service.prepare import Preparer
from kslserve.text.template import ChatTemplate, bundled
from kslserve.text.tokenizer import Tokenizer

CLIENTS = ROOT / "tests" / "data" / "clients"
WINDOW = 1 << 20


def dialects() -> dict[str, Dialect]:
    return {
        "/v1/chat/completions": chat.DIALECT,
        "/v1/responses": responses.dialect(Metrics()),
        "/v1/messages": Messages(DefaultThinking.HIDDEN, Metrics()).dialect,
    }


def conversations(path: Path, known: dict[str, Dialect]) -> list[tuple[Dialect, list[bytes]]]:
    """The last requests of a file, as sent, by endpoint."""
    found: dict[str, list[bytes]] = {}
    for request in json.loads(gzip.decompress(path.read_bytes()))["requests"]:
        endpoint = request["path"].partition("?")[0]
        if endpoint in known:
            body = json.dumps(request["body"], ensure_ascii=False, separators=(",", ":"))
            found.setdefault(endpoint, []).append(body.encode())
    return [(known[endpoint], bodies[-2:]) for endpoint, bodies in found.items()]


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Milliseconds."""
    begun = time.perf_counter()
    work(*arguments)
    return (time.perf_counter() - begun) * 1e3


@dataclass(frozen=True, slots=True)
class Bench:
    tokenizer: Tokenizer
    template: ChatTemplate
    model: ServedModel
    repeat: int

    def whole(self, preparer: Preparer, dialect: Dialect, body: bytes) -> int:
        """All of the work; returns the tokens of the prompt."""
        return len(preparer.prepare_now(dialect.parse(body, self.model).request).ids)

    def row(self, dialect: Dialect, bodies: list[bytes]) -> dict[str, float | int | str]:
        """Figures of one conversation, medians of `repeat` runs."""
        times: dict[str, list[float]] = {"cold_ms": [], "warm_ms": [], "parse_ms": [], "json": []}
        last, tokens = bodies[-1], 0
        for _ in range(self.repeat):
            preparer = Preparer(self.tokenizer, self.template, WINDOW)
            times["cold_ms"].append(timed(self.whole, preparer, dialect, bodies[0]))
            times["warm_ms"].append(timed(self.whole, preparer, dialect, last))
            times["parse_ms"].append(timed(dialect.parse, last, self.model))
            times["json"].append(timed(orjson.loads, last))
            tokens = self.whole(preparer, dialect, last)
            preparer.close()
        figures = {name: statistics.median(values) for name, values in times.items()}
        ratio = figures["warm_ms"] / figures.pop("json")
        return {
            "tokens": tokens,
            "kib": round(len(last) / 1024),
            **figures,
            "ratio": ratio,
            "of": "reading the JSON",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--template", default="3.5", choices=("3.5", "3.6", "3.8"))
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    with open_model(str(bundled_path())) as file:
        assert file.tokenizer_json is not None
        tokenizer = Tokenizer(file.tokenizer_json)
    bench = Bench(
        tokenizer,
        ChatTemplate(bundled(args.template), tokenizer.control_tokens),
        ServedModel("m", WINDOW, SamplingParams(), "", (0,), tokenizer.size, 0),
        args.repeat,
    )
    report = Report("prepare")
    for path in sorted(CLIENTS.glob("*.json.gz")):
        for dialect, bodies in conversations(path, dialects()):
            name = path.name.removesuffix(".json.gz")
            try:
                report.add(name, **bench.row(dialect, bodies))
            except KslError as error:
                report.add(name, refused=str(error))
    rows = [row for row in report.rows if "warm_ms" in row]
    largest = max(rows, key=lambda row: int(row["tokens"]))
    slowest = max(rows, key=lambda row: float(row["warm_ms"]))
    report.add("largest", client=largest["case"], warm_ms=largest["warm_ms"])
    report.add("slowest", client=slowest["case"], warm_ms=slowest["warm_ms"])
    report.write(args.save)


if __name__ == "__main__":
    main()
