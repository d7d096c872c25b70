"""Windows of a file of raw tokens, as a map dataset.

Data path: file -> numpy.memmap -> [tokens] -> worker.

Tokens are copied out of a map of the file. The system ends a process (SIGBUS) that reads a part of a map which another
program has just cut off. So the file's size and time of change are compared before each batch, too; a cut between that
look and the copy still ends the worker, which the loader reports.
"""

from __future__ import annotations

import operator
import os
import stat
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from asyncloader.errors import ShardError
from asyncloader.workers.fetch.dataset_kinds import DigestedDataset

T = TypeVar("T")

Tokens = np.ndarray[Any, np.dtype[Any]]


def positions(indices: Sequence[int], length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the indices of samples as an array; negative ones count from the end.

    Raises:
        IndexError: one is out of range.
        TypeError: one is no integer.
    """
    found = np.asarray(indices)
    if found.dtype.kind not in "iu":
        # Of integers that 64 bits cannot hold, or not in one type, numpy makes objects or floating-point numbers.
        found = np.array([operator.index(each) for each in indices], object)
    wrong = (found < -length) | (found >= length)  # before the conversion: uint64 may not fit
    if wrong.any():
        raise IndexError(f"sample {int(found[wrong][0]):,} of a dataset of {length:,}")
    found = found.astype(np.int64, copy=False)
    return np.where(found < 0, found + length, found)


class Batched(Dataset[T]):
    """A map dataset whose samples are read a batch at a time, by ``__getitems__``."""

    def __getitem__(self, index: int) -> T:
        """Return the sample at an index, by ``__getitems__``, whose errors are raised."""
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        """Return the samples at these indices, which may repeat."""
        raise NotImplementedError


class MappedFile:
    """A local file of numbers. Each process maps it when it first reads; a pickled copy must find the same file.

    Args:
        path: the file. A relative path is taken from the current folder now, not from that of a worker.

    Attributes:
        path: its absolute path.
        size: its bytes, when this object was made.

    Raises:
        OSError: it does not exist, or is no regular file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))  # noqa: PTH100 - a str is kept
        status = os.stat(self.path)  # noqa: PTH116 - as above
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{self.path} is no regular file")
        self.size = status.st_size
        self._modified_ns = status.st_mtime_ns
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_bytes": None}

    def check(self) -> None:
        """Raise ShardError if the file is gone, or was changed since this object was made."""
        try:
            status = os.stat(self.path)  # noqa: PTH116 - a str is kept
        except OSError as error:
            raise ShardError(f"the file cannot be read any more: {error.strerror}", url=self.path) from error
        if (status.st_size, status.st_mtime_ns) != (self.size, self._modified_ns):
            written = ", written since" if status.st_size == self.size else ""
            raise ShardError(
                f"the file has changed: it had {self.size:,} bytes when the dataset was made, and has "
                f"{status.st_size:,}{written}. Make the dataset anew",
                url=self.path,
            )

    def array(self, dtype: npt.DTypeLike, offset: int = 0, count: int | None = None) -> np.ndarray[Any, Any]:
        """Return values of the file, as a read-only view of its map.

        Args:
            dtype: of the values.
            offset: the first value's byte.
            count: the number of values, which must be in the file; None: all that follow.

        Raises:
            ShardError: the file has changed.
        """
        if self._bytes is None:
            try:
                # An empty file cannot be mapped. Of a `memmap` itself, each slice would take microseconds.
                mapped = np.memmap(self.path, np.uint8, "r") if self.size else np.empty(0, np.uint8)
            except (OSError, ValueError):  # gone, or cut between the look at its size and the map
                self.check()
                raise
            self._bytes = mapped.view(np.ndarray)
        self.check()  # behind the map, which may be of a file that was cut before it
        end = None if count is None else offset + count * np.dtype(dtype).itemsize
        return self._bytes[offset:end].view(dtype)


class TokenFile(Batched[Tokens], DigestedDataset):
    """Windows of a local file that holds nothing but tokens, as ``numpy.ndarray.tofile`` writes it.

        data = TokenFile("train.bin", "uint16", context=1025, stride=1024)
        tokens = data[0]    # inputs tokens[:-1], targets tokens[1:]

    Nothing is read before it is needed, and all workers share the system's cache of the file. Each sample is an array
    of its own, of the file's dtype. Tokens after the last whole window are left out.

    Args:
        path: the file, on a local disk.
        dtype: the tokens' type: an integer type, of any byte order.
        context: tokens of a window, at least 1.
        stride: tokens from the beginning of a window to that of the next; None: `context`.
        offset: bytes of a header, which are skipped.

    Attributes:
        num_tokens: tokens of the file.

    Raises:
        ValueError: an argument is out of range.
        ShardError: the file is no whole number of tokens, or holds no window.
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        context: int,
        *,
        stride: int | None = None,
        offset: int = 0,
    ) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype.kind not in "iu":
            raise ValueError(f"tokens are integers, not {self.dtype}; use the integer type that was written")
        self.context = operator.index(context)
        self.stride = self.context if stride is None else operator.index(stride)
        self.offset = operator.index(offset)
        for name, least in (("context", 1), ("stride", 1), ("offset", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self._file = file = MappedFile(path)
        if (file.size - self.offset) % self.dtype.itemsize or file.size < self.offset:
            raise ShardError(
                f"{file.size:,} bytes, of which {self.offset:,} are a header, are no whole number of {self.dtype} "
                "tokens: the file was cut, or has another dtype or header",
                url=file.path,
            )
        self.num_tokens = (file.size - self.offset) // self.dtype.itemsize
        if self.num_tokens < self.context:
            raise ShardError(f"{self.num_tokens:,} tokens are no window of {self.context:,}", url=file.path)
        self._length = (self.num_tokens - self.context) // self.stride + 1

    def __len__(self) -> int:
        return self._length

    def data_digest(self, *, find: bool) -> str:  # noqa: ARG002 - it is known
        """Return the file's size and the windows, as `DigestedDataset.data_digest`."""
        return repr((self._file.size, self.dtype.str, self.context, self.stride, self.offset))

    def __getitems__(self, indices: Sequence[int]) -> list[Tokens]:
        """Return the windows of these indices, each of shape ``(context,)``: the rows of one array.

        Raises:
            IndexError: an index is out of range.
            ShardError: the file has changed.
        """
        values = self._file.array(self.dtype, self.offset)
        # A stride beyond the file, which might not fit, is of its only window.
        starts = positions(indices, self._length) * min(self.stride, self.num_tokens)
        windows: Tokens = np.empty((len(starts), self.context), self.dtype.newbyteorder("="))
        for row, start in zip(windows, starts.tolist(), strict=True):
            row[:] = values[start : start + self.context]
        self._file.check()
        return list(windows)

    def __repr__(self) -> str:
        return f"<TokenFile {self._file.path!r}: {self._length:,} windows of {self.context:,} {self.dtype}>"
