"""The samples of a folder that LitData's `optimize` has written, as a map dataset.

Data path: files -> litdata -> [litdata_folder] -> worker.

LitData's own reader decodes the chunks, so that a sample is what its `StreamingDataset` gives. Each worker, and each of
its threads, has a reader of its own. The reader maps chunks, and a file that is cut under a map ends the process: so
that a chunk is the file that it was is checked before samples are read from it, and after.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from asyncloader.errors import ShardError
from asyncloader.sources.tokens import Batched, MappedFile, positions
from asyncloader.workers.fetch.dataset_kinds import DigestedDataset

_ITEMS, _TOKENS = "PyTreeLoader", "TokensLoader"

_PLAIN = frozenset((bool, int, float, str, bytes))


class LitDataFolder(Batched[Any], DigestedDataset):
    """The samples of a local folder that LitData's ``optimize`` has written: ``index.json`` and its chunks.

        data = LitDataFolder("optimized")
        sample = data[0]    # as litdata.StreamingDataset("optimized")[0]

    It needs ``pip install 'asyncloader[litdata]'``, then ``pip install --no-deps litdata``. When the dataset is made,
    the index is read, and that all chunks exist is checked. A sample's tensors, arrays and bytes are its own: no map of
    a file lies under them. The samples of a batch are read in the order of the files.

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
        self._index = index = MappedFile(f"{self.path}/index.json")
        try:
            found = json.loads(index.array(np.uint8).tobytes())
            config, chunks = dict(found["config"]), list(found["chunks"])
            names = [str(chunk["filename"]) for chunk in chunks]
            counts = [int(chunk["chunk_size"]) for chunk in chunks]
            least = [int(chunk["chunk_bytes"]) for chunk in chunks]
            loader = config.get("item_loader", _ITEMS)  # the first versions have one kind of item
            tokens = [int(chunk["dim"]) for chunk in chunks] if loader == _TOKENS else None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            kind = type(error).__name__
            raise ShardError(f"this is no index of LitData: {kind}: {error}", url=index.path) from error
        _check_form(config, loader, index.path)
        if (self.block_size is None) is not (tokens is None):
            raise ValueError(
                f"{index.path} is of tokens, whose samples are blocks: give block_size="
                if tokens is not None
                else f"block_size={block_size} is for a folder of tokens, and {index.path} is of {loader}"
            )
        if tokens is not None and self.block_size is not None:
            counts = [count // self.block_size for count in tokens]
        self._starts = np.cumsum([0, *counts])
        self._names = names
        self._chunks = [self._chunk(name, size) for name, size in zip(names, least, strict=True)]
        self._serializers = dict(serializers or {})
        self._readers = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_readers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._readers = threading.local()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def data_digest(self, *, find: bool) -> str:  # noqa: ARG002 - it is known
        """Return a digest of the chunks' names, sizes and samples, as `DigestedDataset.data_digest`."""
        text = repr((self._names, [chunk.size for chunk in self._chunks], self._starts.tolist()))
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of these indices, which may repeat.

        Raises:
            IndexError: an index is out of range.
            ShardError: a file has changed, or a chunk is damaged.
        """
        numbers = positions(indices, len(self))
        order = np.argsort(numbers, kind="stable")
        found: list[Any] = [None] * len(numbers)
        # The last of the chunks that begin here: chunks without a sample begin where the next does.
        chunks = np.searchsorted(self._starts, numbers[order], side="right") - 1
        files = [self._index, *(self._chunks[chunk] for chunk in np.unique(chunks).tolist())]
        for file in files:
            file.check()
        for place, number, chunk in zip(order.tolist(), numbers[order].tolist(), chunks.tolist(), strict=True):
            try:
                found[place] = own(self._read(number))
            except Exception as error:
                raise ShardError(
                    f"sample {number:,} cannot be read: {type(error).__name__}: {error}", url=self._chunks[chunk].path
                ) from error
        for file in files:
            file.check()
        return found

    def _chunk(self, name: str, least: int) -> MappedFile:
        """Return a chunk's file. Raises ShardError: it has fewer bytes than the index says, or is no file."""
        path = f"{self.path}/{name}"
        try:
            file = MappedFile(path)
        except OSError as error:
            raise ShardError(f"the chunk cannot be read: {error.strerror or error}", url=path) from error
        if file.size < least:
            raise ShardError(f"the chunk was cut: it has {file.size:,} bytes, and {least:,} by its index", url=path)
        return file

    def _read(self, number: int) -> Any:
        # A forked child makes a reader of its own. While it reads, a reader is left out of use: after an error, LitData
        # may take the chunk before for the chunk that it could not read, and return samples of that.
        pid, reader = getattr(self._readers, "kept", (0, None))
        if reader is None or pid != os.getpid():
            reader = self._open()
        self._readers.kept = 0, None
        try:
            sample = reader[number]
            self._readers.kept = os.getpid(), reader
        finally:
            del reader  # an error's traceback would hold the files open
        return sample

    def _open(self) -> Any:
        from litdata import StreamingDataset, TokensLoader
        from litdata.streaming.resolver import Dir

        # Each sample is decoded alone: a window of them would be decoded anew for each, in the order of a shuffle.
        return StreamingDataset(
            Dir(path=self.path, url=None),
            item_loader=None if self.block_size is None else TokensLoader(block_size=self.block_size),
            serializers=self._serializers or None,
            batch_decode=0,
        )

    def __repr__(self) -> str:
        return f"<LitDataFolder {self.path!r}: {len(self):,} samples in {len(self._chunks):,} chunks>"


def _check_form(config: dict[str, Any], loader: Any, url: str) -> None:
    why = None
    if loader not in (_ITEMS, _TOKENS):
        why = f"its items are of {str(loader)[:80]!r}; those of {_ITEMS} and {_TOKENS} can be read"
    elif config.get("encryption") is not None:
        why = "it is encrypted"
    elif config.get("compression") and not config.get("compression_level"):
        why = (
            "its chunks are compressed as whole files, which LitData replaces by decompressed files as it reads them. "
            'Write it with compression_level="batch", or without compression'
        )
    if why is not None:
        raise ShardError(f"the folder cannot be read in place: {why}", url=url)


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
