"""The sequences of a pair of files as Megatron writes them, as a map dataset.

Data path: files -> local_file -> [megatron] -> worker.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from asyncloader.errors import ShardError
from asyncloader.sources.local_file import LocalFile
from asyncloader.sources.megatron_index import (
    BOUNDARIES,
    HEADER_BYTES,
    MODES,
    POINTERS,
    SIZES,
    check_index,
    read_layout,
)
from asyncloader.sources.tokens import Tokens, positions
from asyncloader.workers.fetch.dataset_kinds import DigestedDataset


class MegatronTokens(Dataset[Tokens], DigestedDataset):
    """The sequences of ``prefix.bin``, by its index ``prefix.idx``: a pair that Megatron's `preprocess_data.py` writes.

        data = MegatronTokens("corpus_text_document")
        tokens = data[0]    # of any length

    Nothing of the data is read before it is needed, and all workers share the system's cache of the files. The whole
    index is checked once, when the dataset is made; workers, and copies that are unpickled, check that the files are
    still the same. For windows over the tokens of all sequences, without regard to documents, use
    ``TokenFile(prefix + ".bin", data.dtype, context)``.

    Args:
        prefix: the path of both files, without ``.bin`` or ``.idx``.

    Attributes:
        dtype: of the tokens.

    Raises:
        ShardError: the index does not have the format, or does not fit the data.
        OSError: a file cannot be opened.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        prefix = os.fspath(prefix).removesuffix(".bin").removesuffix(".idx")
        self._index = index = LocalFile(f"{prefix}.idx")
        self._data = LocalFile(f"{prefix}.bin")
        header = index.array(np.dtype(np.uint8), 0, min(HEADER_BYTES, index.size)).tobytes()
        self._layout = read_layout(header, index.size, index.path)
        self.dtype = self._layout.dtype.newbyteorder("=")
        check_index(self._layout, self.sizes, self._pointers, self.documents, self._data.size, index.path)

    def __len__(self) -> int:
        return self._layout.sequences

    def data_digest(self, *, find: bool) -> str:  # noqa: ARG002 - it is known
        """Return the sizes of both files, as `DigestedDataset.data_digest`."""
        return repr((self._index.size, self._data.size))

    @property
    def sizes(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The tokens of each sequence, as a read-only array of the map: for sampling by length."""
        return self._index.array(SIZES, HEADER_BYTES, self._layout.sequences)

    @property
    def documents(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of each document's first sequence, and the number of all sequences behind the last, as a read-only
        array of the map.
        """
        return self._index.array(BOUNDARIES, self._layout.boundaries_at, self._layout.boundaries)

    @property
    def modes(self) -> np.ndarray[Any, np.dtype[np.int8]] | None:
        """The mode of each sequence of multimodal data, as a read-only array of the map; None where it has none."""
        return self._index.array(MODES, self._layout.modes_at, len(self)) if self._layout.has_modes else None

    @property
    def _pointers(self) -> np.ndarray[Any, Any]:
        return self._index.array(POINTERS, self._layout.pointers_at, self._layout.sequences)

    def __getitem__(self, index: int) -> Tokens:
        """Return the tokens of a sequence, as an array of its own.

        Raises:
            IndexError: `index` is out of range.
            ShardError: a file has changed.
        """
        return self.__getitems__([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tokens]:
        """Return the sequences of these indices. See `__getitem__`."""
        layout = self._layout
        found: list[Tokens] = []
        size, pointer = np.empty(1, SIZES), np.empty(1, POINTERS)
        for number in positions(indices, len(self)).tolist():
            self._index.read_into(size, HEADER_BYTES + number * SIZES.itemsize)
            self._index.read_into(pointer, layout.pointers_at + number * POINTERS.itemsize)
            tokens, start = int(size[0]), int(pointer[0])
            # Checked when the dataset was made: written since, without another time of change.
            if not 0 <= start <= self._data.size - tokens * layout.dtype.itemsize or tokens < 0:
                raise ShardError("the index does not fit its data any more", url=self._index.path)
            found.append(np.empty(tokens, layout.dtype))
            self._data.read_into(found[-1], start)
        self._index.check()
        self._data.check()
        return [each.astype(self.dtype, copy=False) for each in found]

    def __repr__(self) -> str:
        return f"<MegatronTokens {self._data.path!r}: {len(self):,} sequences of {self.dtype}>"
