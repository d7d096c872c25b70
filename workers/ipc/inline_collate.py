"""Collates in the consumer's own process: torch's `default_collate`, in less time and with memory that is reused.

Data path: without workers: fetch -> [inline_collate] -> consumer.

torch makes a tensor of each array, and converts numbers one by one. Here arrays of one shape are joined, and numbers
packed, by one call into C. Whatever is not a plain case is left to torch's own functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils import collate as torch_collate

from asyncloader.workers.ipc.collate import collate_columns
from asyncloader.workers.ipc.layout import PAGE, align
from asyncloader.workers.ipc.leaves import has_code, torch_dtype
from asyncloader.workers.ipc.ring import Anchor, Lease, make_anchor, make_lease

LARGE = 32 << 20
"""Size from which on tensors are recycled: glibc's `DEFAULT_MMAP_THRESHOLD_MAX`. `malloc` keeps smaller blocks."""

_KEPT = 2
"""Free blocks that are kept: a consumer holds one batch while the next is made."""


class Recycler:
    """Hands out blocks of private memory, and reuses each once its last view has died. Any thread.

    An allocator returns large blocks (over 32 MiB in glibc) to the system with every `free`. The next batch would get
    them page by page and zeroed: 2 GB/s instead of 20. So large batches are stacked into memory that is kept. The
    consumer's hold on it is a lease, as on a ring's slot.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._leases: dict[int, tuple[Lease, mmap.mmap]] = {}
        self._released: deque[Lease] = deque()
        self._count = 0

    def take(self, nbytes: int) -> Anchor:
        """Return a block of `nbytes`, with arbitrary content. It is reused once the anchor dies.

        Raises:
            MemoryError: the system has no memory for the block.
        """
        wanted = align(nbytes, PAGE)
        # The callback of a lease does not take it: it only appends, in whatever thread the last view dies, which may
        # hold the lock at that moment.
        with self._lock:
            while self._released:
                self._free.append(self._leases.pop(self._released.popleft().slot)[1])
            # Of the same size only: in a larger block a small batch would keep more memory than it needs.
            memory = next((block for block in self._free if len(block) == wanted), None)
            if memory is None:
                memory = _allocate(wanted)
            else:
                self._free.remove(memory)
            # The oldest go, such as those of a batch size that comes no more.
            del self._free[:-_KEPT]
            anchor = make_anchor(memory, 0, nbytes)
            # A new number for each lease: a block that is used again has another lease than before.
            self._count += 1
            self._leases[self._count] = make_lease(anchor, self._released.append, self._count), memory
        return anchor


def _allocate(nbytes: int) -> mmap.mmap:
    # Copied on write in a forked child; Windows has neither forks nor flags.
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        memory = mmap.mmap(-1, nbytes, **private)
    except OSError as error:
        raise MemoryError(f"no memory for a batch of {nbytes:,} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)  # the first write takes 4 instead of 17 ms for 38 MB
    return memory


_SMALL = 1 << 14
"""Bytes of a column of arrays up to which joining them as bytes, and copying the result, takes less time than
`np.concatenate`, which takes longer for each array."""


def inline_collate() -> Callable[[Sequence[Any]], Any]:
    """Return torch's `default_collate` with a recycler of its own for large tensors.

    Values, shapes, strides, dtypes and errors are torch's; functions that the user registered are used. The storage of
    a recycled tensor cannot be resized, like that of one from a worker.
    """
    recycler = Recycler()

    def stack(batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
        if not _is_large_and_plain(batch):
            return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
        elem = batch[0]
        anchor = recycler.take(elem.numel() * elem.element_size() * len(batch))
        out = torch.frombuffer(anchor, dtype=elem.dtype).view(len(batch), *elem.shape)
        return torch.stack(list(batch), 0, out=out)

    ours = [
        (torch.Tensor, torch_collate.collate_tensor_fn, stack),
        (np.ndarray, torch_collate.collate_numpy_array_fn, _join),
        (int, torch_collate.collate_int_fn, _ints),
        (float, torch_collate.collate_float_fn, _floats),
    ]

    def collate(samples: Sequence[Any]) -> Any:
        functions: Any = dict(torch_collate.default_collate_fn_map)
        whole = True
        for kind, torchs, own in ours:
            if functions.get(kind) is torchs:
                functions[kind] = own
            else:  # the user has registered another
                whole = False
        return collate_columns(samples, functions, _numbers if whole else None)

    return collate


def _join(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    elem, count = batch[0], len(batch)
    shape, strides, dtype = elem.shape, elem.strides, elem.dtype
    kind, nbytes = torch_dtype(dtype), elem.nbytes * count
    if (
        kind is not None
        # Of more dimensions torch follows the strides, which are ambiguous where a length is 1.
        and shape
        and (len(shape) < 3 or 1 not in shape)
        and 0 < nbytes < LARGE
        and elem.flags.c_contiguous
        and min(strides) > 0  # a reversed axis of length 1 is contiguous for numpy, and an error for torch
        and [*map(type, batch)].count(np.ndarray) == count
        and all([each.shape == shape and each.dtype is dtype for each in batch])  # noqa: C419 - faster
        # Else the strides follow from the shape, or `join` raises.
        and ((1 not in shape and nbytes <= _SMALL) or all([each.strides == strides for each in batch]))  # noqa: C419
        and (out := _empty((count, *shape), kind)) is not None
    ):
        if nbytes > _SMALL:
            # Concatenated along the first axis they are the same bytes as stacked, without a view of each.
            np.concatenate(batch, out=_view(out, (count * shape[0], *shape[1:]), dtype))
            return out
        with suppress(TypeError):  # the items of an array are not one after the other
            _fill(out, b"".join(batch))
            return out
    return torch_collate.collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)


def _ints(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    count = len(batch)
    # Only if all have one plain type: torch's dtype of a mixture is another. Its error names a number beyond 64 bits.
    if [*map(type, batch)].count(int) == count and (out := _empty((count,), torch.int64)) is not None:
        with suppress(struct.error):
            _fill(out, struct.pack(f"{count}q", *batch))
            return out
    return torch_collate.collate_int_fn(batch, collate_fn_map=collate_fn_map)


def _floats(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
    count = len(batch)
    if [*map(type, batch)].count(float) == count and (out := _empty((count,), torch.float64)) is not None:
        _fill(out, struct.pack(f"{count}d", *batch))
        return out
    return torch_collate.collate_float_fn(batch, collate_fn_map=collate_fn_map)


def _numbers(array: npt.NDArray[Any]) -> Any:
    real = array.dtype.kind == "f"
    out = _empty(array.shape, torch.float64 if real else torch.int64)
    if out is None:
        torchs = torch_collate.collate_float_fn if real else torch_collate.collate_int_fn
        return torchs(array.tolist())
    _fill(out, array.astype(np.float64 if real else np.int64).tobytes())
    return out


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    """Return a tensor whose memory torch owns, as it would be for torch's own batch; None where torch would make it on
    another device, or of another class (fake tensors).
    """
    out = torch.empty(shape, dtype=dtype, device=None)  # the default device, on purpose: torch's functions take it too
    return out if type(out) is torch.Tensor and out.is_cpu else None


def _fill(out: torch.Tensor, data: bytes) -> None:
    """Copy these bytes, as many as it has, into the tensor."""
    (ctypes.c_char * len(data)).from_address(out.data_ptr()).raw = data


class _Memory:
    """Memory, as numpy's array interface describes it."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": shape, "typestr": dtype.str, "version": 3}


def _view(out: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return the tensor's memory as an array, which must not outlive it. `Tensor.numpy` would forbid to resize it."""
    return np.asarray(_Memory(out.data_ptr(), shape, dtype))


def _is_large_and_plain(batch: Sequence[torch.Tensor]) -> bool:
    elem = batch[0]
    if type(elem) is not torch.Tensor or elem.layout is not torch.strided or elem.is_nested:
        return False
    shape, dtype = elem.shape, elem.dtype
    if elem.numel() * elem.element_size() * len(batch) < LARGE or not has_code(dtype):
        return False
    # Left to torch: samples for which it would promote dtypes, follow strides, record a gradient or raise.
    return 1 not in shape and all(
        type(each) is torch.Tensor
        and each.dtype is dtype
        and each.shape == shape
        and each.device.type == "cpu"
        and not each.requires_grad
        and each.is_contiguous()
        for each in batch
    )
