"""An array or tensor that is shared as a whole: numpy's and torch's own, that travel to new processes by descriptor.

Data path: share -> [array, tensor] -> a dataset in any process.

Arrays and tensors *inside* a shared list or dict are plain ones. The whole ones below are subclasses for the sake of
their pickling only: what is computed from them, or taken out of them with an index, is plain.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncloader.workers.leaves import DTYPE_CODE, DTYPES
from asyncloader.workers.shared_build import array_bytes, array_order, tensor_bytes
from asyncloader.workers.shared_layout import Region, rebuild_array, rebuild_tensor
from asyncloader.workers.shared_segment import SegmentWriter, SharedSegment, spawning

__all__ = ["SharedArray", "SharedTensor", "share_array", "share_tensor"]


class SharedArray(np.ndarray[Any, Any]):
    """A read-only numpy array in shared memory, made by `share`. Views and results of it are plain arrays."""

    _shared: tuple[SharedSegment, Any] | None  # the segment and the place in it; None for derived arrays

    def __array_finalize__(self, source: Any) -> None:
        self._shared = None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain = np.asarray(array)
        return plain[()] if return_scalar or not plain.ndim else plain

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __copy__(self) -> SharedArray:
        return self

    def __deepcopy__(self, memo: Any) -> SharedArray:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._shared is not None and spawning():
            return _open_array, self._shared
        return np.asarray(self).__reduce_ex__(protocol)


class SharedTensor(torch.Tensor):
    """A torch tensor in shared memory, made by `share`. Views and results of it are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _shared: tuple[SharedSegment, Any]

    def __copy__(self) -> SharedTensor:
        return self

    def __deepcopy__(self, memo: Any) -> SharedTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if spawning():
            return _open_tensor, self._shared
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


def share_array(value: np.ndarray[Any, Any]) -> SharedArray:
    """Copy an array without objects to a segment of its own."""
    place = (value.dtype, value.shape, array_order(value))
    return _open_array(_written(array_bytes(value) if value.nbytes else b"", f"share({value.dtype} array)"), place)


def share_tensor(value: torch.Tensor) -> SharedTensor:
    """Copy a dense CPU tensor to a segment of its own."""
    place = (DTYPE_CODE[value.dtype], tuple(value.shape))
    return _open_tensor(_written(tensor_bytes(value) if value.numel() else b"", f"share({value.dtype} tensor)"), place)


def _written(data: Any, what: str) -> SharedSegment:
    writer = SegmentWriter(what)
    try:
        writer.write(data)
        return writer.finish()
    finally:
        writer.close()


def _open_array(segment: SharedSegment, place: Any) -> SharedArray:
    array = rebuild_array(Region(segment.memory, (), _no_nodes), 0, *place).view(SharedArray)
    array._shared = (segment, place)
    return array


def _open_tensor(segment: SharedSegment, place: Any) -> SharedTensor:
    code, shape = place
    region = Region(segment.memory, (), _no_nodes)
    tensor = rebuild_tensor(region, 0, code, shape) if 0 not in shape else torch.empty(shape, dtype=DTYPES[code])
    shared = tensor.as_subclass(SharedTensor)
    shared._shared = (segment, place)
    return shared


def _no_nodes(node: Any) -> Any:
    raise AssertionError(node)
