"""Makes agent_trace.json: which prompts coding agents sent, as pieces that they share.

    python -m tests.data.make_agent_trace [OUT]

Plays the captured conversations of real clients against a server without a model, which is made to
give the captured answers, and notes the ids of each prompt and answer. Where two of them part, and
at each boundary of a prompt, a piece ends; of a piece only its length is kept. Requests beside the
conversation (titles, subagents, summaries) are one-shots. A few seconds on one core.

    pieces: tokens of each. requests: file, seconds since its first request, pieces of the prompt,
    how many of them lie before each boundary, pieces of the answer.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kslserve.config import Settings
from kslserve.sched.cache.index import Node, RadixIndex
from kslserve.sched.scheduler import Job, Sequence, Sink
from tests.server.conversations import DATA, Turn, ask, conversation, dialect_of, play
from tests.server.serving import Server, serving
from tests.server.test_conversations import CONVERSATIONS

OUT = Path(__file__).resolve().parent / "agent_trace.json"


def requests_of(server: Server, name: str) -> list[tuple[float, Job]]:
    """The jobs of a file's requests, with their times; those of its conversation first."""
    file = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    posts = [r for r in file["requests"] if not r["path"].endswith("count_tokens")]
    if not posts:
        return []
    service = server.app.state.service
    assert service is not None
    jobs: list[Job] = []
    submit = service.scheduler.submit

    def spy(job: Job, sink: Sink) -> Sequence:
        jobs.append(job)
        return submit(job, sink)

    service.scheduler.submit = spy  # type: ignore[method-assign]
    try:
        main = conversation(name) if name in CONVERSATIONS else []
        others = [r for r in posts if r["body"] not in main]
        times = [r["seconds_after_first"] for r in posts if r["body"] in main]
        if main:
            play(server.url, name)
        for request in others:
            ask(server.url, dialect_of(name), request["body"], Turn("Done.", "Nothing is left."))
            times.append(request["seconds_after_first"])
    finally:
        service.scheduler.submit = submit  # type: ignore[method-assign]
    return list(zip(times, jobs, strict=True))


def path(node: Node) -> list[Node]:
    """The nodes from the root to one, without the root."""
    nodes: list[Node] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        nodes.append(at)
        at = at.parent
    return nodes[::-1]


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    names = sorted(p.name.removesuffix(".json.gz") for p in DATA.glob("*.json.gz"))
    played: list[tuple[str, float, Job]] = []
    settings = Settings(engine="fake", context=131072, max_seqs=2, test_hooks=True)
    with serving(settings) as server:
        for name in names:
            played += [(name, at, job) for at, job in requests_of(server, name)]
    index = RadixIndex()
    ends: list[tuple[Node, list[Node], Node]] = []

    def held(ids: np.ndarray[Any, Any]) -> Node:
        node = index.insert(ids)
        index.hold(node)
        return node

    for _, _, job in played:
        assert job.forced is not None
        boundaries = [held(job.prompt_ids[:b]) for b in job.boundaries]
        prompt = held(job.prompt_ids)
        ends.append((prompt, boundaries, held(np.concatenate([job.prompt_ids, job.forced]))))
    numbers: dict[Node, int] = {}
    requests = []
    for (name, at, _), (prompt, boundaries, answer) in zip(played, ends, strict=True):
        pieces = [numbers.setdefault(node, len(numbers)) for node in path(answer)]
        n = len(path(prompt))
        requests.append(
            {
                "file": name,
                "at": at,
                "prompt": pieces[:n],
                "boundaries": [len(path(node)) for node in boundaries],
                "answer": pieces[n:],
            }
        )
    trace = {"pieces": [len(node.tokens) for node in numbers], "requests": requests}
    lines = ",\n".join(json.dumps(r, separators=(",", ":")) for r in requests)
    text = json.dumps(trace["pieces"], separators=(",", ":"))
    out.write_text(f'{{"pieces":{text},\n"requests":[\n{lines}\n]}}\n')
    print(f"{len(requests)} requests, {len(numbers)} pieces, {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
