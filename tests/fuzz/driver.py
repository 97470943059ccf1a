"""A mutation fuzzer in plain Python.

Attempt number i of a named run is a function of the name, i and the seeds, so a failure is repeated
by its number: `mutated(name, i, seeds)` is its data.

    fuzz("container", seeds, attempt, seconds)

`attempt(data)` may return or raise ModelFileError with one sentence; all else is a failure.
"""

from __future__ import annotations

import random
import re
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kslserve.errors import ModelFileError

SEEDS = Path(__file__).parent / "seeds"
ATTEMPTS_MIN = 50
MEMORY_BYTES = 400 << 20  # more than this much growth is a failure

NUMBERS = (0, 1, 2, 3, 4, 15, 16, 17, 127, 128, 129, 255, 256, 65535, 65536)
EDGES = tuple((1 << bits) + near for bits in (31, 32, 47, 62, 63, 64) for near in (-1, 0, 1))
JSON = (
    b"null", b"true", b"-1", b"1e999", b"NaN", b"1.5", b'""', b"[]", b"{}", b"[[[[]]]]",
    b'"\\ud800"', b"9" * 400, b'{"a":1,"a":2}', b"\xff\xfe", b"[" * 2000, b"0.1", b"-0",
)  # fmt: skip
HEAD_BYTES = 4096  # where structure is: mutated more often than the rest


def seeds(pattern: str) -> list[bytes]:
    """The committed seeds of a kind, by name."""
    found = [path.read_bytes() for path in sorted(SEEDS.glob(pattern))]
    assert found, f"no seeds {pattern}"
    return found


def fuzz(
    name: str,
    inputs: Sequence[bytes],
    attempt: Callable[[bytes], None],
    seconds: float,
) -> int:
    """Run attempts until the time is over; how many there were. The seeds themselves come first."""
    end = time.monotonic() + seconds
    before = _peak_bytes()
    count = 0
    while count < ATTEMPTS_MIN or time.monotonic() < end:
        data = mutated(name, count, inputs)
        try:
            attempt(data)
        except ModelFileError as error:
            _check_sentence(name, count, error.message)
        except BaseException as error:
            raise AssertionError(f"{name}: attempt {count} ({len(data)} bytes)") from error
        count += 1
    grown = _peak_bytes() - before
    assert grown < MEMORY_BYTES, f"{name}: {grown} bytes more memory after {count} attempts"
    print(f"{name}: {count} attempts")  # pytest -s
    return count


def mutated(name: str, number: int, inputs: Sequence[bytes]) -> bytes:
    """The data of attempt `number`."""
    if number < len(inputs):
        return inputs[number]
    rng = random.Random(f"{name}:{number}")
    data = bytearray(rng.choice(inputs))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        rng.choice(MUTATIONS)(rng, data, inputs)
    return bytes(data)


def _place(rng: random.Random, data: bytearray) -> int:
    limit = len(data) if rng.random() < 0.3 else min(len(data), HEAD_BYTES)
    return rng.randrange(limit + 1)


def _flip(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    if data:
        data[_place(rng, data) % len(data)] ^= 1 << rng.randrange(8)


def _number(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    """A little-endian integer of 1, 2, 4 or 8 bytes."""
    width = rng.choice((1, 2, 4, 4, 8))
    value = rng.choice(NUMBERS + EDGES) & ((1 << (8 * width)) - 1)
    at = _place(rng, data) // width * width if rng.random() < 0.7 else _place(rng, data)
    data[at : at + width] = value.to_bytes(width, "little")


def _digits(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    """Another number where a text has one."""
    found = list(re.finditer(rb"\d+", bytes(data[: 1 << 16])))
    if found:
        match = rng.choice(found)
        value = int(match.group()[:18])
        near = rng.choice((value + 1, value - 1, value * 2, -value, rng.choice(NUMBERS + EDGES)))
        data[match.start() : match.end()] = str(near).encode()


def _json(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    """Another JSON value where a text has one."""
    found = list(re.finditer(rb'"[^"\\]*"|\d+|\[[^\[\]]*\]|true|false', bytes(data[: 1 << 16])))
    if found:
        match = rng.choice(found)
        data[match.start() : match.end()] = rng.choice(JSON)


def _truncate(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    del data[_place(rng, data) :]


def _append(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    data += rng.randbytes(rng.choice((1, 2, 4, 64)))


def _cut(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    at = _place(rng, data)
    del data[at : at + rng.choice((1, 2, 4, 8, 64, 1000))]


def _double(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    at = _place(rng, data)
    piece = data[at : at + rng.choice((1, 4, 16, 200))]
    data[at:at] = piece


def _splice(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    other = rng.choice(inputs)
    at = _place(rng, data)
    data[at:] = other[_place(rng, bytearray(other)) :]


def _swap(rng: random.Random, data: bytearray, inputs: Sequence[bytes]) -> None:
    a, b = sorted((_place(rng, data), _place(rng, data)))
    n = min(rng.choice((1, 4, 8)), b - a, len(data) - b)
    data[a : a + n], data[b : b + n] = data[b : b + n], data[a : a + n]


MUTATIONS = (
    _flip, _flip, _number, _number, _digits, _digits, _json, _json, _truncate, _append, _cut,
    _double, _splice, _swap,
)  # fmt: skip


def _check_sentence(name: str, number: int, text: str) -> None:
    label = f"{name}: attempt {number}: {text!r}"
    assert text.endswith("."), label
    assert "\n" not in text, label
    assert len(text) < 1000, label
    assert text.isprintable(), label


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
