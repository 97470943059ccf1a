"""Every captured request of every client, on the served model: none may be refused.

    python -m bench.replay [--clients NAME,...] [--save] [-- FLAGS]

The requests of a capture go one after another to one server of ksl-nano with a context of 65536
tokens, as they were sent but for the length of the answer. `ratio`: part of the prompt tokens of a
capture that were in the prefix cache; answers are not those that were captured, so it is lower than
a client's own. Exit status 1 where a request was refused.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import json
import time
from pathlib import Path
from typing import Any

from bench.apc import Server
from bench.report import ROOT, Report

CLIENTS = ROOT / "tests/data/clients"
CONTEXT = 65536
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def send(server: Server, path: str, body: dict[str, Any], tokens: int = 1) -> tuple[int, str]:
    """Status and text of the answer, which is that many tokens long at most."""
    body = {**body, **{name: tokens for name in LIMITS if body.get(name)}}
    if not any(body.get(name) for name in LIMITS):
        body["max_output_tokens" if path == "/v1/responses" else "max_tokens"] = tokens
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def usage_of(text: str) -> tuple[int, int]:
    """Prompt tokens and those of them that were cached, of a body or the last event that says."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    prompt = cached = 0
    for line in lines or [text]:
        value = json.loads(line)
        usage = value.get("usage") or (value.get("response") or value.get("message") or {}).get(
            "usage"
        )
        if not usage:
            continue
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        read = usage.get("cache_read_input_tokens")
        if read is not None:
            whole = usage.get("input_tokens", 0) + read
            whole += usage.get("cache_creation_input_tokens") or 0
        else:
            read = details.get("cached_tokens", 0)
            whole = usage.get("prompt_tokens") or usage.get("input_tokens", 0)
        prompt, cached = max(prompt, whole), max(cached, read)
    return prompt, cached


def replay(report: Report, server: Server, path: Path) -> int:
    """The number of refused requests."""
    requests = json.loads(gzip.decompress(path.read_bytes()))["requests"]
    prompts = shared = refused = 0
    begun = time.perf_counter()
    for request in requests:
        status, text = send(server, request["path"], request["body"])
        if status != 200:
            print(f"{path.name}: {status} {text[:200]}")
            refused += 1
        elif not request["path"].partition("?")[0].endswith("count_tokens"):
            prompt, cached = usage_of(text)
            prompts, shared = prompts + prompt, shared + cached
    report.add(
        path.name.removesuffix(".json.gz"), requests=len(requests), refused=refused,
        prompt_tokens=prompts, seconds=time.perf_counter() - begun,
        ratio=shared / max(prompts, 1), of="prompt tokens",
    )  # fmt: skip
    return refused


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", default="", help="comma-separated names of captures")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    wanted = set(filter(None, args.clients.split(",")))
    server = Server("--context", str(CONTEXT), "--max-seqs", "2", *args.flags)
    report = Report("replay")
    try:
        refused = sum(
            replay(report, server, path)
            for path in sorted(CLIENTS.glob("*.json.gz"))
            if not wanted or path.name.removesuffix(".json.gz") in wanted
        )
    finally:
        server.stop()
    report.write(args.save)
    raise SystemExit(1 if refused else 0)


if __name__ == "__main__":
    main()
