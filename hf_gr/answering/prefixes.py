# Copyright 2026 The hf_gr authors.
# SPDX-License-Identifier: Apache-2.0
"""What is known of sequences of tokens, shared by those that begin alike; the least recently used goes first.

Knows no tensors and no threads. A radix tree, as SGLang's RadixAttention (Zheng et al. 2023, section 3).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Part = TypeVar("Part")  # what is known of consecutive tokens


@dataclass(eq=False)
class _Node(Generic[Part]):
    """Tokens after those of `parent`, and what is known of them."""

    tokens: tuple[int, ...]
    part: Part
    parent: _Node[Part] | None
    children: dict[int, _Node[Part]] = field(default_factory=dict)  # by their first token


class PrefixTree(Generic[Part]):
    """Parts of sequences, each kept once however many sequences begin with it.

    Args:
        capacity: what the sizes of all parts may add up to.
        size: the size of a part.
        cut: the part of some tokens of a part: `cut(part, start, stop)`.

    Example:
        >>> tree = PrefixTree(capacity=10, size=len, cut=lambda part, start, stop: part[start:stop])
        >>> tree.add([1, 2, 3], lambda start: "abc"[start:])
        >>> tree.add([1, 2, 4, 5], lambda start: "abde"[start:])
        >>> tree.find([1, 2, 4, 9])
        (3, ['ab', 'de'])
        >>> tree.size
        5
    """

    def __init__(self, *, capacity: int, size: Callable[[Part], int], cut: Callable[[Part, int, int], Part]) -> None:
        self.capacity = capacity
        self.size = 0
        self._size_of = size
        self._cut = cut
        self._roots: dict[int, _Node[Part]] = {}
        # The least recently used first. A node is used whenever one below it is, and after that: the first has none.
        self._by_use: OrderedDict[_Node[Part], None] = OrderedDict()

    def __len__(self) -> int:
        """The number of parts."""
        return len(self._by_use)

    def num_known(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens are known; no use of them."""
        _, length, _ = self._walk(tuple(tokens))
        return length

    def find(self, tokens: Sequence[int]) -> tuple[int, list[Part]]:
        """How many of the first tokens are known, and their parts in order, which count as used.

        The last part may be of more tokens than are asked for.
        """
        path, length, _ = self._walk(tuple(tokens))
        self._use(path)
        return length, [node.part for node in path]

    def add(self, tokens: Sequence[int], make: Callable[[int], Part]) -> None:
        """Keep what is known of tokens; what exceeds the capacity goes, the least recently used first.

        Args:
            tokens: a whole sequence.
            make: gives the part of all tokens from a position on: only that is new. One that exceeds the capacity by
                itself is not kept.
        """
        given = tuple(tokens)
        path, length, of_last = self._walk(given)
        if length < len(given):
            part = make(length)
            if self._size_of(part) > self.capacity:
                return
            if path and of_last < len(path[-1].tokens):
                path[-1] = self._split(path[-1], of_last)
            path.append(self._put(given[length:], part, path[-1] if path else None))
        self._use(path)
        while self.size > self.capacity:
            self._drop(next(iter(self._by_use)))

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._by_use.clear()
        self.size = 0

    def _walk(self, tokens: tuple[int, ...]) -> tuple[list[_Node[Part]], int, int]:
        """The nodes that begin like tokens, from the root on, how many tokens they match, and how many the last."""
        path: list[_Node[Part]] = []
        children, length, matched = self._roots, 0, 0
        while length < len(tokens) and (node := children.get(tokens[length])) is not None:
            path.append(node)
            matched = _num_common(node.tokens, tokens, length)
            length += matched
            if matched < len(node.tokens):
                break
            children = node.children
        return path, length, matched

    def _put(self, tokens: tuple[int, ...], part: Part, parent: _Node[Part] | None) -> _Node[Part]:
        node = _Node(tokens, part, parent)
        (self._roots if parent is None else parent.children)[tokens[0]] = node
        self._by_use[node] = None
        self.size += self._size_of(part)
        return node

    def _split(self, node: _Node[Part], length: int) -> _Node[Part]:
        """A new node of a node's first tokens, above the rest of it."""
        tokens, part = node.tokens, node.part
        head = self._put(tokens[:length], self._cut(part, 0, length), node.parent)
        self.size -= self._size_of(part)
        node.tokens, node.part, node.parent = tokens[length:], self._cut(part, length, len(tokens)), head
        head.children[node.tokens[0]] = node
        self.size += self._size_of(node.part)
        return head

    def _use(self, path: list[_Node[Part]]) -> None:
        for node in reversed(path):
            self._by_use.move_to_end(node)

    def _drop(self, node: _Node[Part]) -> None:
        assert not node.children
        siblings = self._roots if node.parent is None else node.parent.children
        del siblings[node.tokens[0]], self._by_use[node]
        self.size -= self._size_of(node.part)


def _num_common(edge: tuple[int, ...], tokens: tuple[int, ...], start: int) -> int:
    """How many of an edge's tokens are those from a position on."""
    given = tokens[start : start + len(edge)]
    if given == edge:
        return len(edge)
    pairs = enumerate(zip(edge, given, strict=False))
    return next((number for number, (ours, theirs) in pairs if ours != theirs), len(given))
