"""The samples of a folder that LitData's `optimize` has written, as a map dataset.

Data path: files -> litdata -> [litdata_folder] -> worker.

LitData's own reader decodes the chunks, so that a sample is what its `StreamingDataset` gives. Each worker, and each of
its threads, has a reader of its own. The reader maps chunks, and a file that is cut under a map ends the process: so
that a chunk is the file that it was is checked before samples are read from it, and after.
"""

from __future__ import annotations

import hashlib
import operator
import os
import stat
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from asyncloader.errors import ShardError
from asyncloader.sources.litdata_index import MAX_INDEX_BYTES, ChunkTable, parse_index
from asyncloader.sources.local_file import LocalFile
from asyncloader.sources.tokens import positions
from asyncloader.workers.fetch.dataset_kinds import DigestedDataset
from asyncloader.workers.fetch.worker_resource import worker_resource


class LitDataFolder(Dataset[Any], DigestedDataset):
    """The samples of a local folder that LitData's ``optimize`` has written: ``index.json`` and its chunks.

        data = LitDataFolder("optimized")
        sample = data[0]    # as litdata.StreamingDataset("optimized")[0]

    It needs ``pip install 'asyncloader[litdata]'``, then ``pip install --no-deps litdata``. When the dataset is made,
    the index is checked, and that all chunks exist. A sample's tensors, arrays and bytes are its own: no map of a file
    lies under them. The samples of a batch are read in the order of the files.

    LitData unpickles values that it has no type for (``pickle`` and ``graph`` in the index): read only folders that
    you trust. A folder whose chunks are encrypted, or compressed as whole files, is refused.

    Args:
        path: the folder, on a local disk.
        block_size: tokens of a sample, for a folder that was written with ``TokensLoader``; None for all others.
        serializers: for values of your own types, as of ``StreamingDataset``; with spawned workers they are pickled.

    Raises:
        ValueError: `block_size` is below 1, is missing for tokens, or is given for anything else.
        ShardError: the index is damaged, or does not fit its files; or the chunks cannot be read in place.
        OSError: the index cannot be opened.
        ImportError: litdata is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        block_size: int | None = None,
        serializers: Mapping[str, Any] | None = None,
    ) -> None:
        if find_spec("litdata") is None:
            raise ImportError(
                "LitDataFolder reads by litdata, which is not installed: pip install 'asyncloader[litdata]', then "
                "pip install --no-deps litdata"
            )
        self.block_size = None if block_size is None else operator.index(block_size)
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {self.block_size}")
        self.path = os.path.abspath(os.fspath(path))  # noqa: PTH100 - a str is kept
        self._index = index = LocalFile(f"{self.path}/index.json")
        if index.size > MAX_INDEX_BYTES:
            raise ShardError(f"the index has more than {MAX_INDEX_BYTES:,} bytes", url=index.path)
        data = np.empty(index.size, np.uint8)
        index.read_into(data, 0)
        index.check()
        self._chunks = parse_index(data.tobytes(), self.block_size, index.path)
        self._files = np.array([self._identity(number) for number in range(len(self._chunks.names))], np.int64)
        self._readers = worker_resource(partial(_FolderReader, self.block_size, dict(serializers or {})))

    def __len__(self) -> int:
        return int(self._chunks.starts[-1])

    def data_digest(self, *, find: bool) -> str:  # noqa: ARG002 - it is known
        """Return a digest of the chunks' names, sizes and samples, as `DigestedDataset.data_digest`."""
        chunks = self._chunks
        text = repr((chunks.names, self._files[:, 0].tolist(), chunks.starts.tolist()))
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def __getitem__(self, index: int) -> Any:
        """Return a sample.

        Raises:
            IndexError: `index` is out of range.
            ShardError: a file has changed, or a chunk is damaged.
        """
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of these indices, which may repeat. See `__getitem__`."""
        numbers = positions(indices, len(self))
        order = np.argsort(numbers, kind="stable")
        found: list[Any] = [None] * len(numbers)
        if not found:
            return found
        chunks = _chunks_of(self._chunks, numbers[order])
        self._check(np.unique(chunks))
        with self._readers(self.path) as reader:
            for place, number, chunk in zip(order.tolist(), numbers[order].tolist(), chunks.tolist(), strict=True):
                try:
                    found[place] = own(reader.read(number))
                except Exception as error:
                    raise ShardError(
                        f"sample {number:,} cannot be read: {type(error).__name__}: {error}", url=self._url(chunk)
                    ) from error
        self._check(np.unique(chunks))
        return found

    def _url(self, chunk: int) -> str:
        return f"{self.path}/{self._chunks.names[chunk]}"

    def _check(self, chunks: npt.NDArray[np.int64]) -> None:
        self._index.check()
        for chunk in chunks.tolist():
            found = self._identity(chunk)
            if found != tuple(self._files[chunk].tolist()):
                raise ShardError(
                    f"the file has changed: it had {int(self._files[chunk, 0]):,} bytes when the dataset was made, and "
                    f"has {found[0]:,}. Make the dataset anew",
                    url=self._url(chunk),
                )

    def _identity(self, chunk: int) -> tuple[int, int]:
        """Return the size and time of change of a chunk's file."""
        try:
            status = os.stat(self._url(chunk))  # noqa: PTH116 - a str is kept
        except OSError as error:
            raise ShardError(f"the chunk cannot be read: {error.strerror}", url=self._url(chunk)) from error
        least = int(self._chunks.least_bytes[chunk])
        if not stat.S_ISREG(status.st_mode) or status.st_size < least:
            raise ShardError(
                f"the chunk was cut, or is no file: it has {status.st_size:,} bytes, and {least:,} by its index",
                url=self._url(chunk),
            )
        return status.st_size, status.st_mtime_ns

    def __repr__(self) -> str:
        return f"<LitDataFolder {self.path!r}: {len(self):,} samples in {len(self._chunks.names):,} chunks>"


def _chunks_of(table: ChunkTable, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the chunk of each sample."""
    # The last of those that begin here: chunks without a sample begin where the next does.
    return np.searchsorted(table.starts, numbers, side="right") - 1


class _FolderReader:
    """LitData's reader of a folder. Used by one thread at a time."""

    def __init__(self, block_size: int | None, serializers: dict[str, Any], path: str) -> None:
        self._options = block_size, serializers, path
        self._dataset: Any = None

    def read(self, number: int) -> Any:
        """Return a sample, as LitData makes it."""
        # It is left out of use while it reads: after an error, LitData's reader may take the chunk before for the chunk
        # that it could not read, and return samples of that.
        dataset, self._dataset = self._open() if self._dataset is None else self._dataset, None
        try:
            found = dataset[number]
            self._dataset = dataset
        finally:
            del dataset  # an error's traceback would hold the files open
        return found

    def _open(self) -> Any:
        from litdata import StreamingDataset, TokensLoader
        from litdata.streaming.resolver import Dir

        block_size, serializers, path = self._options
        # Each sample is decoded alone: a window of them would be decoded anew for each, in the order of a shuffle.
        return StreamingDataset(
            Dir(path=path, url=None),
            item_loader=None if block_size is None else TokensLoader(block_size=block_size),
            serializers=serializers or None,
            batch_decode=0,
        )


def own(value: Any) -> Any:
    """Return a value in whose tensors, arrays and bytes no memory of a map is left."""
    kind = type(value)
    if kind is dict:
        return {key: own(each) for key, each in value.items()}
    if kind in (list, tuple):
        return kind(map(own, value))
    if kind in _PLAIN:
        return value
    from litdata.utilities._pytree import tree_map

    return tree_map(_own_leaf, value)  # enters exactly the containers that LitData restores


def _own_leaf(value: Any) -> Any:
    if isinstance(value, memoryview):
        return value.tobytes()
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, np.ndarray) and not value.flags.writeable:  # LitData's own are copies; the maps are read-only
        return value.copy()
    return value


_PLAIN = frozenset((bool, int, float, str, bytes))
