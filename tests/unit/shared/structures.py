"""Structures in ordinary memory instead of a segment, and strategies for the values that the tests write."""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

from hypothesis import strategies as st

from asyncloader.shared.builder import Builder
from asyncloader.shared.layout import DictNode, ListNode, Node, Region, open_node

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=6)  # lone surrogates too
SCALARS = st.one_of(
    ANY_TEXT, st.binary(max_size=6), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)
)
KEYS = st.one_of(SCALARS, st.tuples(SCALARS, SCALARS))
STRUCTURES: Any = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=8),
        st.lists(inner, max_size=8).map(tuple),
        st.dictionaries(KEYS, inner, max_size=8),
    ),
    max_leaves=40,
)


class Point(NamedTuple):
    x: Any
    y: Any


class Bytes:
    """A sink that is a bytearray."""

    def __init__(self) -> None:
        self.data = bytearray(b"x")  # so that nothing begins at 0 by accident

    def write(self, data: Any, align: int = 1) -> int:
        self.data += bytes(-len(self.data) % align)
        offset = len(self.data)
        self.data += memoryview(data)
        return offset


def plain(node: Node) -> Any:
    """The node's contents as plain lists, tuples and dicts."""
    if isinstance(node, DictNode):
        return {node.key(i): node.value(i) for i in range(node.count)}
    items = [node.item(i) for i in range(node.count)]
    return tuple(items) if node.is_tuple else items


def built(value: Any, large: int = 4, shared: tuple[type, ...] = (), wrap: Any = plain) -> Any:
    """Write the value and return its node, opened for reading."""
    sink = Bytes()
    builder = Builder(sink, shared, large)
    offset = builder.build(value)
    memory = mmap.mmap(-1, len(sink.data))
    memory[:] = bytes(sink.data)
    return open_node(Region(memory, tuple(builder.externals), wrap), offset)


class Opened(NamedTuple):
    """Stands for a nested node in tests of which values become nodes."""

    node: Node


def list_of(value: Any, **options: Any) -> ListNode:
    node = built(value, **options)
    assert isinstance(node, ListNode)
    return node


def dict_of(value: Any, **options: Any) -> DictNode:
    node = built(value, **options)
    assert isinstance(node, DictNode)
    return node
