"""The radix index against a list of paths."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kslserve.sched.cache.checkpoint import Checkpoint, DeviceCopy, Kind
from kslserve.sched.cache.index import Node, RadixIndex, common_prefix
from kslserve.sched.cache.value import LEAF, SHARED, SUPERSEDED, chance, lasting, saved, value

Text = list[int]
# Few symbols: paths share beginnings, split and contain each other.
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def ids(text: Text) -> np.ndarray:
    return np.array(text, np.int32)


def follow(a: Text, b: Text) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(TEXT, TEXT)
def test_common_prefix(a: Text, b: Text) -> None:
    assert common_prefix(ids(a), ids(b)) == follow(a, b)
    assert common_prefix(ids(a), ids([])) == 0


ACTION = st.tuples(st.sampled_from(["hold", "release", "attach", "detach", "match"]), TEXT)


@given(st.lists(ACTION, max_size=40))
def test_index_against_a_list(actions: list[tuple[str, Text]]) -> None:
    index = RadixIndex()
    held: list[tuple[Text, Node]] = []
    kept: dict[tuple[int, ...], Checkpoint] = {}
    for action, text in actions:
        version = index.version
        if action == "hold":
            node = index.insert(ids(text))
            index.hold(node)
            held.append((text, node))
        elif action == "release" and held:
            index.release(held.pop(text[0] % len(held))[1])
        elif action == "attach" and tuple(text) not in kept:
            node = index.insert(ids(text))
            kept[tuple(text)] = checkpoint = Checkpoint(node, Kind.PROMPT, 0)
            index.attach(node, checkpoint)
            assert index.version != version
        elif action == "detach" and kept:
            name = sorted(kept)[text[0] % len(kept)]
            index.detach(kept.pop(name).node)
            assert index.version != version
        index.check()
        paths = [t for t, _ in held] + [list(name) for name in kept]
        match = index.match(ids(text))
        assert match.known == max((follow(text, path) for path in paths), default=0)
        on_the_way = [name for name in kept if list(name) == text[: len(name)]]
        assert match.found == [kept[name] for name in sorted(on_the_way, key=len)]
        assert set(index.checkpoints()) == set(kept.values())
        for name, checkpoint in kept.items():
            assert tuple(checkpoint.node.ids()) == name
            assert checkpoint.position == len(name)
    for _, node in held:
        index.release(node)
    for checkpoint in kept.values():
        index.detach(checkpoint.node)
    assert not index.root.children


def keep(index: RadixIndex, text: Text, kind: Kind = Kind.GENERATION, used: int = 0) -> Checkpoint:
    node = index.insert(ids(text))
    checkpoint = Checkpoint(node, kind, used)
    checkpoint.device = DeviceCopy(0, [])
    index.attach(node, checkpoint)
    return checkpoint


def test_worth_follows_from_the_place_in_the_tree() -> None:
    index = RadixIndex()
    system = keep(index, [1] * 4, Kind.SYSTEM)
    turn = keep(index, [1] * 6)
    leaf = keep(index, [1] * 9)
    assert (saved(system.node), saved(turn.node), saved(leaf.node)) == (4, 2, 3)
    assert value(leaf, 0) == 3 * LEAF
    assert value(turn, 0) == 2 * SUPERSEDED[Kind.GENERATION]
    assert [lasting(c) for c in (system, turn, leaf)] == [True, False, True]
    # Another conversation begins the same: now the beginning is shared, and hits raise it.
    other = keep(index, [1] * 5 + [2])
    assert lasting(keep(index, [1] * 5, Kind.INTERVAL))
    assert chance(Kind.SYSTEM, index.insert(ids([1] * 5)), 0, 0) == SHARED
    assert chance(Kind.SYSTEM, index.insert(ids([1] * 5)), 3, 0) == 4 * SHARED
    # With what is between gone, more would be lost with it.
    index.detach(turn.node)
    assert saved(leaf.node) == 4
    assert lasting(other)


def test_chances_fade_with_admissions() -> None:
    index = RadixIndex()
    leaf = keep(index, [1, 2], used=10)
    worth = [value(leaf, now) for now in (10, 20, 200)]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > worth[1] > worth[2] > 0
