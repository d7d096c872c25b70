"""`share`: keeps one copy of a large read-only structure for all processes.

Data path: a large list, dict, array or tensor -> [share] -> a dataset, in the main process and in every worker.

A forked worker that reads a Python list writes to it: every access to an item changes its reference count, and the
kernel copies the page. Each worker therefore ends up with a separate copy; a spawned worker starts with it. The result
of `share` holds no Python object per item. The items are bytes in one anonymous segment, and are rebuilt when accessed.

`SharedList` and `SharedDict` read such a segment. `SharedArray` and `SharedTensor` are arrays and tensors that were
shared as a whole: these subclasses of numpy's and torch's change only the pickling, so items, slices and results of
them are plain. Arrays and tensors *inside* a shared list or dict are plain, too.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from typing import Any, Generic, NoReturn, TypeVar, overload

import numpy as np
import torch

from asyncloader.shared.builder import Builder, array_bytes, array_order, tensor_bytes
from asyncloader.shared.layout import DictNode, ListNode, Node, Region, open_node, rebuild_array, rebuild_tensor
from asyncloader.shared.segment import SegmentWriter, SharedSegment, is_spawning
from asyncloader.workers.memory.leaves import DTYPE_CODE, DTYPES, has_code
from asyncloader.workers.notebook_pickling import in_session


class SharedArray(np.ndarray[Any, Any]):
    """A read-only numpy array in shared memory, made by `share`. Items, slices and results of it are plain arrays."""

    _shared: tuple[SharedSegment, Any] | None
    # The segment, and dtype, shape and order. None for derived arrays: numpy makes views and copies in this class, too,
    # and a copy is private and writable.

    def __array_finalize__(self, source: Any) -> None:
        # Also called for views, which must not pickle as the whole array.
        self._shared = None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain = np.asarray(array)
        return plain[()] if return_scalar or not plain.ndim else plain

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __copy__(self) -> Any:
        return np.array(self) if self.flags.writeable else self

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._shared is not None and is_spawning():
            return _open_array, self._shared
        return np.asarray(self).__reduce_ex__(protocol)


class SharedTensor(torch.Tensor):
    """A torch tensor in shared memory, made by `share`. Views and results of it are plain tensors."""

    # Operations return plain tensors, at the speed of plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _shared: tuple[SharedSegment, Any]

    def __copy__(self) -> SharedTensor:
        return self

    def __deepcopy__(self, memo: Any) -> SharedTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_spawning():
            return _open_tensor, self._shared
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def share_array(value: np.ndarray[Any, Any]) -> SharedArray:
    """Copy an array without objects to a segment of its own."""
    meta = (value.dtype, value.shape, array_order(value))
    return _open_array(_write_segment(array_bytes(value) if value.nbytes else b"", f"share({value.dtype} array)"), meta)


def share_tensor(value: torch.Tensor) -> SharedTensor:
    """Copy a dense CPU tensor to a segment of its own."""
    meta = (DTYPE_CODE[value.dtype], tuple(value.shape))
    return _open_tensor(
        _write_segment(tensor_bytes(value) if value.numel() else b"", f"share({value.dtype} tensor)"), meta
    )


def _write_segment(data: Any, what: str) -> SharedSegment:
    writer = SegmentWriter(what)
    try:
        writer.write(data)
        return writer.finish()
    finally:
        writer.close()


def _open_array(segment: SharedSegment, meta: Any) -> SharedArray:
    array = rebuild_array(Region(segment.memory, (), _no_nodes), 0, *meta).view(SharedArray)
    array._shared = (segment, meta)
    return array


def _open_tensor(segment: SharedSegment, meta: Any) -> SharedTensor:
    code, shape = meta
    region = Region(segment.memory, (), _no_nodes)
    tensor = (
        rebuild_tensor(region, 0, code, shape)
        if 0 not in shape
        else torch.empty(shape, dtype=DTYPES[code], device="cpu")
    )
    shared = tensor.as_subclass(SharedTensor)
    shared._shared = (segment, meta)
    return shared


def _no_nodes(node: Any) -> Any:
    raise AssertionError(node)


T_co = TypeVar("T_co", covariant=True)
K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)
T = TypeVar("T")


class SharedList(Sequence[T_co], Generic[T_co]):
    """A read-only list in shared memory, made by `share`.

    Indexing rebuilds the item: O(1), nothing is cached. A slice is a view and copies nothing. Equal to the list (or
    tuple) that it was made from. Reading from several threads is safe.
    """

    __slots__ = ("__weakref__", "_item", "_node", "_range")
    __hash__ = None  # type: ignore[assignment]

    _node: ListNode
    _range: range
    _item: Callable[[int], Any]  # the node's method

    def __init__(self, *_: Any) -> None:
        raise TypeError("a SharedList is made by share(list), not by calling the class")

    def __len__(self) -> int:
        return len(self._range)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> SharedList[T_co]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return _list_view(self._node, self._range[index])
        try:
            position = self._range[index]
        except (IndexError, TypeError) as error:
            raise type(error)(_index_text(index, len(self._range))) from None
        return self._item(position)

    def __iter__(self) -> Iterator[T_co]:
        return map(self._item, self._range)

    def __reversed__(self) -> Iterator[T_co]:
        return map(self._item, reversed(self._range))

    def __contains__(self, value: Any) -> bool:
        return any(_same(item, value) for item in self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SharedList):
            if other._node.is_tuple != self._node.is_tuple:
                return False
        elif not isinstance(other, tuple if self._node.is_tuple else list):
            return NotImplemented
        return len(self) == len(other) and all(map(_same, self, other))

    def __repr__(self) -> str:
        return f"<SharedList: {len(self):,} {self._node.kind}>"

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(_FIXED.format(kind="SharedList", original="list", plain="tolist()"))

    def __delitem__(self, index: Any) -> NoReturn:
        raise TypeError(_FIXED.format(kind="SharedList", original="list", plain="tolist()"))

    def __copy__(self) -> SharedList[T_co]:
        return self

    def __deepcopy__(self, memo: Any) -> SharedList[T_co]:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return the list as an array; of int, float or bool a read-only view, unless `dtype` or `copy` need a copy."""
        numbers = self._node.numbers()
        if numbers is None:
            return np.array(self.tolist(), dtype)
        step = self._range.step
        stop = self._range.stop if self._range.stop >= 0 else None
        view = numbers[self._range.start : stop : step] if len(self._range) else numbers[:0]
        return np.array(view, dtype) if copy else view.astype(dtype or view.dtype, copy=False)

    def __reduce__(self) -> Any:
        if is_spawning():
            return _open_list, (self._node.region.owner, self._node.offset, self._range)
        return (tuple if self._node.is_tuple else list), (self.tolist(),)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment that contains this list."""
        return _segment_of(self._node).nbytes

    def tolist(self) -> list[T_co]:
        """Return a plain list of plain items. Arrays and tensors in it are still views of the segment."""
        return list(map(_plain, self))


class SharedDict(Mapping[K, V_co], Generic[K, V_co]):
    """A read-only dict in shared memory, made by `share`.

    Looking up a key takes O(1) and rebuilds the value. Iteration order is that of the dict that it was made from, to
    which it is equal. Reading from several threads is safe.
    """

    __slots__ = ("__weakref__", "_node")
    __hash__ = None  # type: ignore[assignment]

    _node: DictNode

    def __init__(self, *_: Any) -> None:
        raise TypeError("a SharedDict is made by share(dict), not by calling the class")

    def __len__(self) -> int:
        return self._node.count

    def __getitem__(self, key: K) -> V_co:
        position = self._node.find(key)
        if position < 0:
            raise KeyError(key)
        value: V_co = self._node.value(position)
        return value

    def __iter__(self) -> Iterator[K]:
        return map(self._node.key, range(self._node.count))

    def __reversed__(self) -> Iterator[K]:
        return map(self._node.key, reversed(range(self._node.count)))

    def __contains__(self, key: object) -> bool:
        return self._node.find(key) >= 0

    def values(self) -> ValuesView[V_co]:
        """Return the values, in the keys' order."""
        return _Values(self)

    def items(self) -> ItemsView[K, V_co]:
        """Return the pairs of key and value, in the keys' order."""
        return _Items(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SharedDict | dict):
            return NotImplemented
        if len(self) != len(other):
            return False
        return all(key in other and _same(value, other[key]) for key, value in self.items())

    def __repr__(self) -> str:
        return f"<SharedDict: {len(self):,} keys>"

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(_FIXED.format(kind="SharedDict", original="dict", plain="todict()"))

    def __delitem__(self, key: Any) -> NoReturn:
        raise TypeError(_FIXED.format(kind="SharedDict", original="dict", plain="todict()"))

    def __copy__(self) -> SharedDict[K, V_co]:
        return self

    def __deepcopy__(self, memo: Any) -> SharedDict[K, V_co]:
        return self

    def __reduce__(self) -> Any:
        if is_spawning():
            return _open_dict, (self._node.region.owner, self._node.offset)
        return dict, (self.todict(),)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment that contains this dict."""
        return _segment_of(self._node).nbytes

    def todict(self) -> dict[K, V_co]:
        """Return a plain dict of plain values. Arrays and tensors in it are still views of the segment."""
        return {key: _plain(value) for key, value in self.items()}


class _Values(ValuesView[Any]):
    _mapping: SharedDict[Any, Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self._mapping._node.value, range(len(self._mapping)))

    def __contains__(self, value: object) -> bool:
        return any(_same(each, value) for each in self)


class _Items(ItemsView[Any, Any]):
    _mapping: SharedDict[Any, Any]

    def __iter__(self) -> Iterator[Any]:
        return zip(self._mapping, _Values(self._mapping), strict=True)


SHARED = (SharedList, SharedDict, SharedArray, SharedTensor)

_FIXED = "a {kind} cannot be changed: change the {original} before share(), or take a plain copy with {plain}"
_SUPPORTED = "share() takes a list, tuple, dict, numpy array or torch tensor"


@overload
def share(obj: list[T] | tuple[T, ...] | SharedList[T]) -> SharedList[T]: ...
@overload
def share(obj: dict[K, T] | SharedDict[K, T]) -> SharedDict[K, T]: ...
@overload
def share(obj: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]: ...
@overload
def share(obj: torch.Tensor) -> torch.Tensor: ...
def share(obj: Any) -> Any:
    """Copy a large read-only structure to one anonymous segment of shared memory, for all processes.

    Keep the result in the dataset instead of the original. It is in memory once, for any number of workers: a forked
    worker inherits it, a spawned worker gets a file descriptor. Any other pickling (`pickle.dumps`, `torch.save`, a
    queue) is by value, as a plain list, dict, array or tensor.

    Lists of str, of bytes, of int, of float and of bool are packed. Arrays and tensors at any depth become views of the
    segment. Any other item is pickled, and unpickled on each access. A list, tuple or dict *inside* becomes a
    `SharedList` or `SharedDict` if it has 1,024 entries or more, or if it is an entry of a smaller container and itself
    contains such a large container; otherwise it stays plain. Objects that were shared before are kept as they are.

    Arrays are read-only. torch has no read-only tensors: a write to a shared tensor changes it in the writing process
    only, which gets private copies of the written pages.

    Args:
        obj: a list, tuple, dict, numpy array (of any dtype without Python objects) or dense CPU tensor. It is not
            changed and may be deleted afterwards. The keys of dicts of 1,024 entries or more must be str, bytes,
            numbers, None, or tuples of these.

    Returns:
        A `SharedList` for a list or tuple, a `SharedDict` for a dict, an array or tensor for an array or tensor; `obj`
        itself if it is shared already. The memory is freed when no process has the result, or an array or tensor taken
        from it, any more.

    Raises:
        TypeError: `obj`, or a key, is of another kind.
        ValueError: a list or dict contains itself.
        RingMemoryError: the memory does not suffice.
        Exception: pickling an item failed; a note says which item.
    """
    # A copy that numpy has made of a shared array has its class, and is private memory.
    if isinstance(obj, SHARED) and not (isinstance(obj, SharedArray) and obj._shared is None):
        return obj
    if type(obj) in (np.ndarray, np.memmap, SharedArray):
        if obj.dtype.hasobject:
            raise TypeError(f"{_SUPPORTED}, but this array holds Python objects: give share() its tolist()")
        return share_array(np.asarray(obj))
    if type(obj) is torch.Tensor:
        return share_tensor(_check_tensor(obj))
    if not isinstance(obj, list | dict) and type(obj) is not tuple:
        hint = "; make a list of it" if isinstance(obj, set | frozenset | range | Iterator | Sequence) else ""
        raise TypeError(f"{_SUPPORTED}, not {type(obj).__name__}{hint}")
    writer = SegmentWriter(f"share({type(obj).__name__} of {len(obj):,})")
    try:
        builder = Builder(writer, SHARED, session=in_session())
        offset = builder.build(obj)
        segment = writer.finish(tuple(builder.externals))
    finally:
        writer.close()
    return _wrap(_open(segment, offset))


def _check_tensor(tensor: torch.Tensor) -> torch.Tensor:
    what = None
    if tensor.device.type != "cpu":
        what = f"on {tensor.device}: call cpu() on it first"
    elif tensor.requires_grad:
        what = "that requires grad: call detach() on it first"
    elif tensor.layout is not torch.strided or tensor.is_nested or not has_code(tensor.dtype):
        what = f"of layout {tensor.layout} and dtype {tensor.dtype}: put it into a list, or call to_dense() on it"
    if what is not None:
        raise TypeError(f"{_SUPPORTED}, but not a tensor {what}")
    return tensor


def _open(segment: SharedSegment, offset: int) -> Node:
    return open_node(Region(segment.memory, segment.externals, _wrap, segment), offset)


def _open_list(segment: SharedSegment, offset: int, indices: range) -> SharedList[Any]:
    node = _open(segment, offset)
    assert isinstance(node, ListNode)
    return _list_view(node, indices)


def _open_dict(segment: SharedSegment, offset: int) -> Any:
    return _wrap(_open(segment, offset))


def _wrap(node: Node) -> SharedList[Any] | SharedDict[Any, Any]:
    if isinstance(node, ListNode):
        return _list_view(node, range(node.count))
    shared: SharedDict[Any, Any] = object.__new__(SharedDict)
    shared._node = node
    return shared


def _list_view(node: ListNode, indices: range) -> SharedList[Any]:
    shared: SharedList[Any] = object.__new__(SharedList)
    shared._node, shared._range, shared._item = node, indices, node.item
    return shared


def _segment_of(node: Node) -> SharedSegment:
    segment: SharedSegment = node.region.owner
    return segment


def _index_text(index: Any, length: int) -> str:
    if hasattr(index, "__index__"):
        return f"index {index} is out of range for a SharedList of {length:,} items"
    return f"indices of a SharedList are integers or slices, not {type(index).__name__}"


def _same(one: Any, other: Any) -> bool:
    """Return whether two items are equal, as in lists; arrays and tensors are compared as a whole."""
    if one is other:
        return True
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return both and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def _plain(value: Any) -> Any:
    if isinstance(value, SharedList):
        return tuple(value.tolist()) if value._node.is_tuple else value.tolist()
    return value.todict() if isinstance(value, SharedDict) else value
