"""A radix tree over token ids: what prefixes are known, and which of them have a checkpoint.

A node is the end of an edge; its path is all tokens from the root. Paths are held by running and
recent sequences, so that a new prompt finds where it leaves a known one, whether or not state was
kept there. Equality is of the tokens themselves, never of hashes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kslserve.engine.types import Ids

if TYPE_CHECKING:
    from kslserve.sched.cache.checkpoint import Checkpoint


def common_prefix(a: Ids, b: Ids) -> int:
    """How many leading tokens are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    if not n:
        return 0
    first = int(differs.argmax())
    return first if differs[first] else n


class Node:
    """end: length of its path. tokens: the edge from the parent. holders: sequences whose path ends
    here. below: checkpoints in its subtree, its own not among them."""

    __slots__ = ("below", "checkpoint", "children", "end", "holders", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Ids, end: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.end = end
        self.children: dict[int, Node] = {}
        self.checkpoint: Checkpoint | None = None
        self.holders = 0
        self.below = 0

    @property
    def total(self) -> int:
        """Checkpoints in its subtree and its own."""
        return self.below + (self.checkpoint is not None)

    def ids(self) -> Ids:
        """All tokens of the path."""
        parts = []
        node: Node | None = self
        while node is not None:
            parts.append(node.tokens)
            node = node.parent
        return np.concatenate(parts[::-1])


class Match:
    """known: how far the ids follow any path. found: checkpoints on the way, ascending."""

    __slots__ = ("found", "known")

    def __init__(self, known: int, found: list[Checkpoint]) -> None:
        self.known = known
        self.found = found


class RadixIndex:
    """version: changes whenever a match may. path_bytes: of the tokens of all edges."""

    __slots__ = ("path_bytes", "root", "version")

    def __init__(self) -> None:
        self.root = Node(None, np.empty(0, np.int32), 0)
        self.version = 0
        self.path_bytes = 0

    def match(self, ids: Ids) -> Match:
        """Follow the ids as far as any path goes."""
        node, at = self.root, 0
        found: list[Checkpoint] = []
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                break
            same = common_prefix(child.tokens, ids[at : at + len(child.tokens)])
            at += same
            if same < len(child.tokens):
                break
            node = child
            if node.checkpoint is not None:
                found.append(node.checkpoint)
        return Match(at, found)

    def insert(self, ids: Ids) -> Node:
        """The node whose path is exactly these ids, made where it does not exist. Only nodes with a
        holder, a checkpoint or two children stay: hold it before anything else changes."""
        node, at = self.root, 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                child = Node(node, ids[at:].copy(), len(ids))
                self.path_bytes += child.tokens.nbytes
                node.children[int(ids[at])] = child
                self.version += 1
                return child
            same = common_prefix(child.tokens, ids[at : at + len(child.tokens)])
            if same < len(child.tokens):
                child = self._split(child, same)
            at += same
            node = child
        return node

    def hold(self, node: Node) -> None:
        """Keep the path of this node known."""
        node.holders += 1

    def release(self, node: Node) -> None:
        """Undo one hold."""
        node.holders -= 1
        self._prune(node)

    def attach(self, node: Node, checkpoint: Checkpoint) -> None:
        """Put a checkpoint on a node that has none."""
        assert node.checkpoint is None
        node.checkpoint = checkpoint
        self._count(node, 1)

    def detach(self, node: Node) -> None:
        """Take the node's checkpoint away."""
        node.checkpoint = None
        self._count(node, -1)
        self._prune(node)

    def checkpoints(self) -> Iterator[Checkpoint]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node.checkpoint is not None:
                yield node.checkpoint
            stack.extend(node.children.values())

    def check(self) -> None:
        """Assert that edges, counts and ends agree and that nothing superfluous is left."""
        stack, nbytes = [self.root], 0
        while stack:
            node = stack.pop()
            nbytes += node.tokens.nbytes
            for token, child in node.children.items():
                assert child.parent is node
                assert len(child.tokens)
                assert int(child.tokens[0]) == token
                assert child.end == node.end + len(child.tokens)
                needed = child.holders or child.checkpoint is not None
                assert needed or len(child.children) > 1, "a node without purpose"
            assert node.below == sum(child.total for child in node.children.values())
            if node.checkpoint is not None:
                assert node.checkpoint.node is node
            stack.extend(node.children.values())
        assert self.path_bytes == nbytes

    def _count(self, node: Node, change: int) -> None:
        self.version += 1
        above = node.parent
        while above is not None:
            above.below += change
            above = above.parent

    def _split(self, child: Node, at: int) -> Node:
        """Cut an edge after `at` tokens; the new node in its middle."""
        parent = child.parent
        assert parent is not None
        middle = Node(parent, child.tokens[:at].copy(), parent.end + at)
        parent.children[int(middle.tokens[0])] = middle
        child.tokens = child.tokens[at:].copy()
        child.parent = middle
        middle.children[int(child.tokens[0])] = child
        middle.below = child.total
        return middle

    def _prune(self, node: Node) -> None:
        """Remove what nobody needs, upwards from a node."""
        while node.parent is not None and not node.holders and node.checkpoint is None:
            parent = node.parent
            if not node.children:
                del parent.children[int(node.tokens[0])]
                self.path_bytes -= node.tokens.nbytes
                self.version += 1
                node = parent
                continue
            if len(node.children) == 1:
                (child,) = node.children.values()
                child.tokens = np.concatenate([node.tokens, child.tokens])
                child.parent = parent
                parent.children[int(child.tokens[0])] = child
            return
