"""`share`: keeps one copy of a large read-only structure for all processes.

Data path: a large list or dict -> [share] -> a dataset, in the main process and in every worker.

A forked worker that reads a Python list writes to it: every access to an item changes its reference count, and the
kernel copies the page. Each worker therefore ends up with a separate copy; a spawned worker starts with it. The result
of `share` holds no Python object per item. The items are bytes in one anonymous segment, and are rebuilt when accessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch

from asyncloader.shared.builder import Builder
from asyncloader.shared.layout import SharedDict, SharedList, open_node
from asyncloader.shared.segment import SegmentWriter

K = TypeVar("K")
T = TypeVar("T")


@overload
def share(obj: list[T] | tuple[T, ...] | SharedList[T]) -> SharedList[T]: ...
@overload
def share(obj: dict[K, T] | SharedDict[K, T]) -> SharedDict[K, T]: ...
def share(obj: Any) -> Any:
    """Copy a large read-only structure to one anonymous segment of shared memory, for all processes.

    Keep the result in the dataset instead of the original. It is in memory once, for any number of workers: a forked
    worker inherits it, a spawned worker gets a file descriptor. Any other pickling (`pickle.dumps`, `torch.save`, a
    queue) is by value, as a plain list, tuple or dict.

    Lists of str, of bytes, of int, of float and of bool are packed. Arrays and tensors at any depth become views of the
    segment. Any other item is pickled, and unpickled on each access. A list, tuple or dict *inside* becomes a
    `SharedList` or `SharedDict` if it has 1,024 entries or more, or if it is an entry of a smaller container and itself
    contains such a large container; otherwise it stays plain.

    Arrays are read-only. torch has no read-only tensors: a write to a shared tensor changes it in the writing process
    only, which gets private copies of the written pages.

    Args:
        obj: a list, tuple or dict. It is not changed and may be deleted afterwards. The keys of dicts that become a
            `SharedDict` must be str, bytes, numbers, None, or tuples of these.

    Returns:
        A `SharedList` for a list or tuple, a `SharedDict` for a dict; `obj` itself if it is shared already. The memory
        is freed when no process has the result, or an array or tensor taken from it, any more.

    Raises:
        TypeError: `obj`, or a key, is of another kind.
        ValueError: a list or dict contains itself.
        RingMemoryError: the memory does not suffice.
        Exception: pickling an item failed; a note says which item.
    """
    if isinstance(obj, SharedList | SharedDict):
        return obj
    if not isinstance(obj, list | dict) and type(obj) is not tuple:
        raise TypeError(f"share() takes a list, tuple or dict, not {type(obj).__name__}{_hint(obj)}")
    writer = SegmentWriter(f"share({type(obj).__name__} of {len(obj):,})")
    try:
        builder = Builder(writer)
        offset = builder.build(obj)
        segment = writer.finish(builder.session_objects)
    finally:
        writer.close()
    return open_node(segment, offset)


def _hint(obj: Any) -> str:
    """Return what to do with an object that cannot be shared; empty: no way is known."""
    if isinstance(obj, torch.Tensor):
        return ": workers share it as it is, forked or spawned"
    if isinstance(obj, np.ndarray):
        return ": forked workers share it as it is; for spawned ones keep torch.from_numpy(array), or a dict with it"
    if isinstance(obj, set | frozenset | range | Iterator | Sequence):
        return "; make a list of it"
    return ""
