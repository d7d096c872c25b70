"""Collates directly into the slot: samples are stacked once, where the consumer will read them.

Data path: worker: fetch -> [collate] -> codec -> ring.

torch's `collate(batch, collate_fn_map=...)` walks the samples and makes the structure of the batch (dictionaries, named
tuples, sequences, a user's own mapping types); this module only supplies the functions for the types at the bottom.
They do not stack: they record the tensors to be stacked and return a placeholder. The stacking happens once the offset
in shared memory is known, with ``out=`` that memory.

Samples that are plain dictionaries, tuples or lists are collated column by column: torch's `collate`, in less time.
torch compares the type of the first sample, and of the first value of each column, with every type that has a
function; here both are looked up. All other samples are left to torch. Samples that come from columns
(`SampleColumns`) are not made: their columns of numbers are collated as they are.

Values, dtypes and errors are torch's: whatever is not a plain case goes through torch's own functions and is copied
once.
"""

from __future__ import annotations

import mmap
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data._utils import collate as torch_collate

from asyncloader.workers.ipc.codec import Encoded, Encoder
from asyncloader.workers.ipc.leaves import dense_leaf, dense_view, has_code, torch_dtype

_TORCH_MAP = dict(torch_collate.default_collate_fn_map)  # torch's own functions, before a user registered others

_TENSORS = frozenset([torch.Tensor])
_PLAIN_DISPATCH: Any = vars(torch.Tensor)["__torch_dispatch__"]
_ARRAYS = frozenset([np.ndarray, np.memmap])
"""Other subclasses may refuse `out=`, or give it a meaning of their own."""
_INTS = frozenset([int])
_FLOATS = frozenset([float, int])
_LEAVES = frozenset([np.ndarray, torch.Tensor, int, float, bool, str, bytes])

_SMALL = 1 << 14
"""Bytes of a column of arrays up to which joining them as bytes, and copying the result, takes less time than
`np.concatenate`, which takes longer for each array."""


def _collate_tensor_private(batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    """Stack into private memory, unlike torch's function for tensors: the result is copied to the slot anyway."""
    elem = batch[0]
    if elem.is_nested or elem.layout is not torch.strided:
        return _TORCH_MAP[torch.Tensor](batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    wraps = getattr(type(elem), "__torch_dispatch__", None) is not _PLAIN_DISPATCH  # other tensors, perhaps
    if elem.device.type != "cpu" or elem.is_quantized or elem.requires_grad or wraps:
        return torch.stack(list(batch), 0)
    # As in torch's own workers, the first sample's type and dtype are those of the batch, and it is contiguous.
    return torch.stack(list(batch), 0, out=elem.new_empty((len(batch), *elem.shape)))


def use_private_memory() -> None:
    """Make torch's `default_collate` stack into private memory in this process (a worker).

    In a torch worker it would create a file in ``/dev/shm`` for every tensor: slow, and fatal in a container with 64 MB
    there. For a user's collate function that calls `default_collate`, the result is in private memory and copied once.
    """
    # A function that the program has registered in its place stays.
    if torch_collate.default_collate_fn_map.get(torch.Tensor) is _TORCH_MAP[torch.Tensor]:
        torch_collate.default_collate_fn_map[torch.Tensor] = _collate_tensor_private


class Collator:
    """Does what `default_collate` does, but returns an `Encoded` batch that is stacked when it is written.

    Used in a worker; not thread-safe. Functions that the user registered in torch's `default_collate_fn_map` are used.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        # torch's functions for numbers make tensors on the default device, and a forked worker has the trainer's.
        self._elsewhere = torch.get_default_device().type != "cpu"
        own: dict[Any, Callable[..., Any]] = {
            torch.Tensor: self._tensors,
            np.ndarray: self._arrays,
            float: self._floats,
            int: self._ints,
        }
        self._private = dict(torch_collate.default_collate_fn_map)
        self._map: dict[Any, Callable[..., Any]] = {}
        for kind, function in self._private.items():
            torchs = function in (_TORCH_MAP.get(kind), _collate_tensor_private)
            self._map[kind] = (own.get(kind, function)) if torchs else self._with_private_map(function)
        whole = all(self._map.get(kind) == own[kind] for kind in (int, float, np.ndarray))
        self._array_numbers = self._numbers_of_array if whole else None

    def collate(self, samples: Sequence[Any]) -> Encoded:
        """Collate and encode.

        Raises:
            RuntimeError, TypeError: as torch's `default_collate`, with the same text. Samples of different shapes are
                detected when the batch is written.
        """
        if self._elsewhere:
            with torch.device("cpu"):
                return self._collate(samples)
        return self._collate(samples)

    def _collate(self, samples: Sequence[Any]) -> Encoded:
        # `__getitems__` may return any object, so its truth value and its items are used only of a list or a tuple.
        straight = isinstance(samples, (list, tuple)) and bool(samples) and _only_stores_values(samples[0])
        straight = straight or isinstance(samples, SampleColumns)
        try:
            batch = collate_columns(samples, self._map if straight else self._private, self._array_numbers)
        except BaseException:
            self._encoder.discard()  # the leaves that were announced for a part of the batch
            raise
        return self._encoder.encode(batch)

    def _with_private_map(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a user's function. It may collate parts of samples and use the result, so it gets no placeholders."""

        def collate(batch: Sequence[Any], **_: Any) -> Any:
            return function(batch, collate_fn_map=self._private)

        return collate

    # Each of these is called with the values that make up one leaf of the batch.

    def _tensors(self, batch: Sequence[torch.Tensor], **_: Any) -> Any:
        elem = batch[0]
        if (
            elem.is_nested
            or elem.layout is not torch.strided
            or elem.device.type != "cpu"
            or elem.is_quantized
            or elem.requires_grad
            or not has_code(elem.dtype)
            or not _TENSORS.issuperset(map(type, batch))  # a subclass anywhere in the batch decides the result
        ):
            return _collate_tensor_private(batch)
        values = list(batch)
        shape = (len(values), *elem.shape)
        dtype = elem.dtype
        nbytes = elem.numel() * elem.element_size() * len(values)
        if not nbytes:
            return _collate_tensor_private(values)

        # As in torch's own workers, the first sample's dtype is that of the batch.
        def write(memory: mmap.mmap, offset: int) -> None:
            torch.stack(values, 0, out=dense_view(memory, offset, dtype, shape))

        return self._placeholder(shape, dtype, nbytes, write)

    def _arrays(self, batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
        elem = batch[0]
        dtype, shape = elem.dtype, elem.shape
        kind = torch_dtype(dtype)
        if kind is None or not shape or not elem.size or not _alike(batch, dtype, shape):
            if torch_collate.np_str_obj_array_pattern.search(dtype.str) is not None:
                return _TORCH_MAP[np.ndarray](batch, collate_fn_map=collate_fn_map)  # raises torch's error
            return self._tensors([torch.as_tensor(b, device="cpu") for b in batch])
        joined = (len(batch) * shape[0], *shape[1:])

        nbytes = elem.nbytes * len(batch)

        # For arrays of one shape, concatenating along the first axis writes the same bytes as stacking, without
        # creating a view of each.
        def write(memory: mmap.mmap, offset: int) -> None:
            if nbytes <= _SMALL:
                with suppress(TypeError):  # the items of an array are not one after the other
                    memory[offset : offset + nbytes] = b"".join(batch)
                    return
            np.concatenate(batch, out=np.ndarray(joined, dtype, memory, offset))

        return self._placeholder((len(batch), *shape), kind, nbytes, write)

    def _floats(self, batch: Sequence[Any], **_: Any) -> Any:
        if not _FLOATS.issuperset(map(type, batch)):
            return torch.tensor(batch, dtype=torch.float64, device="cpu")
        try:
            return self._numbers(f"{len(batch)}d", batch, torch.float64)
        except OverflowError:  # an integer that no float can hold
            return torch.tensor(batch, dtype=torch.float64, device="cpu")

    def _ints(self, batch: Sequence[Any], **_: Any) -> Any:
        # `struct` packs a list of numbers twenty times as fast as torch. Only if all have one plain type: mixtures, and
        # numbers beyond 64 bits, are left to torch.
        if not _INTS.issuperset(map(type, batch)):
            return torch.tensor(batch, device="cpu")
        try:
            return self._numbers(f"{len(batch)}q", batch, torch.int64)
        except struct.error:
            return torch.tensor(batch, device="cpu")

    def _numbers_of_array(self, array: npt.NDArray[Any]) -> Any:
        real = array.dtype.kind == "f"
        kind, dtype = (np.float64, torch.float64) if real else (np.int64, torch.int64)

        def write(memory: mmap.mmap, offset: int) -> None:
            np.ndarray(array.shape, kind, memory, offset)[:] = array

        return self._placeholder(array.shape, dtype, 8 * array.size, write)

    def _numbers(self, layout: str, batch: Sequence[Any], dtype: torch.dtype) -> Any:
        packed = struct.pack(layout, *batch)

        def write(memory: mmap.mmap, offset: int) -> None:
            memory[offset : offset + len(packed)] = packed

        return self._placeholder((len(batch),), dtype, len(packed), write)

    def _placeholder(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        nbytes: int,
        write: Callable[[mmap.mmap, int], None],
    ) -> Any:
        return self._encoder.placeholder(dense_leaf(shape, dtype, nbytes, write))


def _only_stores_values(sample: Any) -> bool:
    """Whether the sample consists of containers that only store their values.

    A user's own mapping or sequence type may use the values that torch puts into it. Then the batch is made of real
    tensors, and copied to the slot.
    """
    kind = type(sample)
    if kind in _LEAVES:
        return True
    if kind in (dict, OrderedDict):
        return all(map(_only_stores_values, sample.values()))
    if kind in (list, tuple) or (kind.__bases__ == (tuple,) and hasattr(kind, "_fields")):  # a plain named tuple
        return all(map(_only_stores_values, sample))
    if isinstance(sample, (str, bytes)):
        return True
    return not isinstance(sample, (Mapping, Sequence))


def _alike(batch: Sequence[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    if not _ARRAYS.issuperset(map(type, batch)):
        return False
    for array in batch:  # noqa: SIM110 - faster than a generator
        if array.shape != shape or array.dtype is not dtype:
            return False
    return True


def count_samples(samples: Any) -> int:
    """Return the number of samples, or -1 if they cannot be counted: `__getitems__` may give an iterator."""
    try:
        return len(samples)
    except TypeError:
        return -1


# ----------------------------------------------------------------------------------------------- by column

_KINDS = torch_collate.default_collate_fn_map.copy().keys()  # the types that torch has functions for

Functions = Mapping[Any, Callable[..., Any]]
"""The functions that collate a column, by the type of its first value."""


class SampleColumns(Sequence[Any]):
    """Samples that are plain dictionaries of plain values, each of which is made when it is asked for."""

    def columns(self) -> Mapping[str, list[Any] | npt.NDArray[Any]] | None:
        """Return the samples' values at each key. An array of one dimension holds Python's numbers, an array of more
        dimensions holds arrays. None: the samples are not known by column.
        """
        raise NotImplementedError


def collate_columns(
    samples: Sequence[Any], functions: Functions, numbers: Callable[[npt.NDArray[Any]], Any] | None = None
) -> Any:
    """Return what ``torch.utils.data._utils.collate.collate(samples, collate_fn_map=functions)`` returns.

    Args:
        samples: of the batch.
        functions: see there.
        numbers: collates an array of Python's integers or floats, which no user sees before; so only where `functions`
            has no function of a user's for numbers and arrays. None: samples that come from columns are made.

    Raises:
        Exception: the same errors. A function may have been called before with the same column.
    """
    if isinstance(samples, SampleColumns):
        columns = samples.columns() if numbers is not None and functions.keys() == _KINDS else None
        if numbers is not None and columns is not None:
            with suppress(TypeError):  # torch tries again, and raises the error
                return {key: _whole_column(column, functions, numbers) for key, column in columns.items()}
        samples = list(samples)
    # A function for another type may be meant for the samples themselves.
    if functions.keys() == _KINDS and isinstance(samples, (list, tuple)) and samples:
        first = samples[0]
        kind = type(first)
        if kind is dict:
            with suppress(TypeError):  # torch tries again, and raises the error
                return {key: _column([sample[key] for sample in samples], functions) for key in first}
        # Also for lists: torch returns a copy of the first sample, with other items.
        elif (kind is tuple or kind is list) and {*map(type, samples)} == {kind} and len({*map(len, samples)}) == 1:
            return [_column(column, functions) for column in zip(*samples, strict=True)]
    return torch_collate.collate(samples, collate_fn_map=functions)  # type: ignore[arg-type]


def _whole_column(column: Any, functions: Functions, numbers: Callable[[npt.NDArray[Any]], Any]) -> Any:
    if not isinstance(column, np.ndarray):
        return _column(column, functions)
    if column.ndim > 1:
        # A copy, as the samples' own arrays would be: torch warns of an array that cannot be written to.
        return _column(list(column.copy()), functions)
    # Of unsigned integers of 64 bits, torch's dtype and error depend on the values.
    return _column(column.tolist(), functions) if column.dtype == np.uint64 else numbers(column)


def _column(values: Sequence[Any], functions: Functions) -> Any:
    function = functions.get(type(values[0]))
    if function is not None:
        return function(values, collate_fn_map=functions)
    return torch_collate.collate(values, collate_fn_map=functions)  # type: ignore[arg-type]
