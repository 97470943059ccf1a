"""The output parser: megabytes of model output per second and time per token, in CPU time.

    python -m bench.parser [--kib 512] [--save]

Each text is fed in pieces of the size of tokens, and in large ones. `ratio` compares with the least
that any parser must do: make one event per piece, without a look at the text. The last rows turn
ids of the bundled tokenizer into text and parse it, as a generation does.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence

from bench.report import Report
from kslserve.core.events import TextDelta
from kslserve.core.request import ToolSpec
from kslserve.core.usage import FinishReason
from kslserve.ksl.open import open_model
from kslserve.parse.stream import OutputParser
from kslserve.text.detokenizer import Detokenizer
from kslserve.text.tokenizer import Tokenizer

TOKEN_CHARS = 4
LARGE_CHARS = 4096
REPEATS = 3
PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "edits": {"type": "array", "items": {"type": "object"}},
    },
}
TOOLS = tuple(
    ToolSpec(name, {"type": "function", "function": {"name": name}}, PARAMETERS)
    for name in ("Read", "Write", "Edit", "Bash", "Grep", "Glob", "Task", "WebFetch")
)

PROSE = (
    "The reader keeps what it has seen of a line until the line is complete, so that it does\n"
    "not matter how the text was cut. `start` and `end` are offsets; 3 < 4 holds.\n\n"
)
CODE = (
    "```python\n"
    "def items(self) -> dict[str, list[int]]:\n"
    '    """Members by name."""\n'
    '    found = {"a": [1, 2], "b": []}\n'
    "    for name, value in self.pairs():\n"
    "        if 0 < value <= self.limit:\n"
    "            found.setdefault(name, []).append(value << 2)\n"
    "    return found\n"
    "```\n\n"
    "<div class='x'>{{ body }}</div>\n"
)
TYPED = '{"old": "a < b", "new": "line one\\nline two", "at": [1, 2, 3]}, '


def call(name: str, parameter: str, value: str) -> str:
    return (
        f"<tool_call>\n<function={name}>\n<parameter=path>\nsrc/main.py\n</parameter>\n"
        f"<parameter={parameter}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )


def texts(size: int) -> dict[str, str]:
    """Outputs of about `size` characters."""

    def filled(unit: str) -> str:
        return unit * (size // len(unit) + 1)

    block = PROSE * 20
    return {
        "prose": filled(PROSE),
        "code": filled(CODE),
        "string argument": call("Write", "content", filled(CODE)),
        "typed argument": call("Edit", "edits", f"[{filled(TYPED).rstrip(', ')}]"),
        "many calls": "\n".join([call("Write", "content", block)] * (size // len(block) + 1)),
    }


def pieces_of(text: str, mean: int) -> list[str]:
    """`text` in pieces of a mean length, always the same ones."""
    dice = random.Random(mean)
    sizes = (dice.randint(1, 2 * mean - 1) for _ in itertools.count())
    marks = list(itertools.takewhile(lambda at: at < len(text), itertools.accumulate(sizes)))
    return [text[a:b] for a, b in itertools.pairwise([0, *marks, len(text)])]


def parse(pieces: Iterable[str]) -> None:
    parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id")
    for piece in pieces:
        parser.feed(piece)
    parser.finish(FinishReason.STOP)


def least(pieces: Iterable[str]) -> None:
    for piece in pieces:
        [TextDelta(piece)]


def generate(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """What a generation does with each token."""
    detokenizer = Detokenizer(tokenizer)
    parser = OutputParser(TOOLS, thinking=False, make_id=lambda: "id")
    for token in ids:
        if text := detokenizer.feed((token,)):
            parser.feed(text)
    parser.finish(FinishReason.STOP)


def seconds(work: Callable[[], None]) -> float:
    """The best of a few runs."""
    best = float("inf")
    for _ in range(REPEATS):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kib", type=int, default=512)
    options.add_argument("--save", action="store_true")
    args = options.parse_args()
    report = Report("parser")
    made = texts(args.kib << 10)
    for name, text in made.items():
        for mean in (TOKEN_CHARS, LARGE_CHARS):
            pieces = pieces_of(text, mean)
            spent = seconds(lambda pieces=pieces: parse(pieces))  # type: ignore[misc]
            base = seconds(lambda pieces=pieces: least(pieces))  # type: ignore[misc]
            report.add(
                f"{name}, {mean} chars",
                mb_s=len(text.encode()) / 1e6 / spent,
                us_piece=spent / len(pieces) * 1e6,
                ratio=spent / base,
                of="one event per piece",
            )
    model = open_model("ksl-nano")
    assert model.tokenizer_json is not None
    tokenizer = Tokenizer(model.tokenizer_json)
    for name, text in made.items():
        ids = tokenizer.encode(text[: 64 << 10]).tolist()
        spent = seconds(lambda ids=ids: generate(ids, tokenizer))  # type: ignore[misc]
        report.add(f"{name}, per token", us_token=spent / len(ids) * 1e6, tokens=len(ids))
    report.write(args.save)


if __name__ == "__main__":
    main()
