r"""The sequences of a pair of files as Megatron writes them, as a map dataset.

Data path: files -> numpy.memmap -> [megatron] -> worker.

The index, as Megatron Core's documentation of its data pipeline has it, little-endian: the 9 bytes ``MMIDIDX\0\0``; the
version, 1, in 8 bytes; a code of the tokens' type in 1; the number of sequences and that of document boundaries, in 8
each. Then for each sequence its tokens (int32), for each its byte in the data (int64), and the document boundaries
(int64), which are numbers of sequences: the first is 0, the last the number of all. Multimodal data have a mode (int8)
for each sequence after that.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncloader.errors import ShardError
from asyncloader.sources.tokens import Batched, MappedFile, Tokens, positions
from asyncloader.workers.fetch.dataset_kinds import DigestedDataset

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9xQBQQ")
HEADER_BYTES = _HEADER.size

_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}

_BLOCK = 1 << 20  # sequences that are checked at a time


class MegatronTokens(Batched[Tokens], DigestedDataset):
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
        self._index = index = MappedFile(f"{prefix}.idx")
        self._data = MappedFile(f"{prefix}.bin")
        header = index.array(np.uint8, 0, min(HEADER_BYTES, index.size)).tobytes()
        if len(header) < HEADER_BYTES or not header.startswith(_MAGIC):
            raise ShardError("this is no Megatron index, which begins with MMIDIDX, or it was cut", url=index.path)
        numbers: tuple[int, int, int, int] = _HEADER.unpack(header)
        version, code, self._sequences, self._boundaries = numbers
        if version != 1 or code not in _TYPES:
            raise ShardError(
                f"an index of version {version:,} with tokens of type {code}: only version 1 with integers (types "
                f"{', '.join(map(str, _TYPES))}) can be read",
                url=index.path,
                offset=len(_MAGIC),
            )
        self.dtype = np.dtype(_TYPES[code])
        # Python's integers, of which none overflows: nothing is mapped for these numbers before they fit the file.
        self._pointers_at = HEADER_BYTES + 4 * self._sequences
        self._boundaries_at = self._pointers_at + 8 * self._sequences
        self._modes_at = self._boundaries_at + 8 * self._boundaries
        if index.size not in (self._modes_at, self._modes_at + self._sequences):
            raise ShardError(
                f"an index of {self._sequences:,} sequences and {self._boundaries:,} document boundaries has "
                f"{self._modes_at:,} bytes, and this file {index.size:,}: it was cut, or is no index",
                url=index.path,
                offset=min(index.size, self._modes_at),
            )
        self._check_sequences()
        self._check_documents()

    def _check_sequences(self) -> None:
        """Raise ShardError unless all sequences lie in the data."""
        itemsize, sizes = self.dtype.itemsize, self.sizes
        pointers = self._index.array("<i8", self._pointers_at, self._sequences)
        for first in range(0, self._sequences, _BLOCK):
            size, at = sizes[first : first + _BLOCK], pointers[first : first + _BLOCK]
            # Not `at + size * itemsize <= data_size`, which a pointer near 2**63 would overflow.
            room = self._data.size - size.astype(np.int64) * itemsize
            wrong = (size < 0) | (at < 0) | (at > room) | (at % itemsize != 0)
            if wrong.any():
                number = int(np.argmax(wrong))
                raise ShardError(
                    f"sequence {first + number:,} is said to have {int(size[number]):,} tokens from byte "
                    f"{int(at[number]):,}, and the data {self._data.size:,} bytes: data and index are not of one pair, "
                    "or one was cut",
                    url=self._index.path,
                    offset=self._pointers_at + (first + number) * 8,
                )

    def _check_documents(self) -> None:
        """Raise ShardError unless the documents' boundaries ascend from 0 to the number of sequences."""
        found = self.documents
        blocks = range(0, len(found), _BLOCK)
        ascend = all((np.diff(found[first : first + _BLOCK + 1]) >= 0).all() for first in blocks)
        ends = (int(found[0]), int(found[-1])) if len(found) else (0, 0)
        if not ascend or ends != (0, self._sequences):
            raise ShardError(
                f"the document boundaries do not ascend from 0 to the {self._sequences:,} sequences",
                url=self._index.path,
                offset=self._boundaries_at,
            )

    def __len__(self) -> int:
        return self._sequences

    def data_digest(self, *, find: bool) -> str:  # noqa: ARG002 - it is known
        """Return the sizes of both files, as `DigestedDataset.data_digest`."""
        return repr((self._index.size, self._data.size))

    @property
    def sizes(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The tokens of each sequence, as a read-only array of the map: for sampling by length."""
        return self._index.array("<i4", HEADER_BYTES, self._sequences)

    @property
    def documents(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of each document's first sequence, and the number of all sequences behind the last, as a read-only
        array of the map.
        """
        return self._index.array("<i8", self._boundaries_at, self._boundaries)

    @property
    def modes(self) -> np.ndarray[Any, np.dtype[np.int8]] | None:
        """The mode of each sequence of multimodal data, as a read-only array of the map; None where it has none."""
        return self._index.array("i1", self._modes_at) if self._index.size > self._modes_at else None

    def __getitems__(self, indices: Sequence[int]) -> list[Tokens]:
        """Return the tokens of these sequences, each as an array of its own.

        Raises:
            IndexError: an index is out of range.
            ShardError: a file has changed.
        """
        numbers = positions(indices, len(self))
        starts = self._index.array("<i8", self._pointers_at, self._sequences)[numbers]
        ends = starts + self.sizes[numbers].astype(np.int64) * self.dtype.itemsize
        data, stored = self._data.array(np.uint8), self.dtype.newbyteorder("<")
        found = [
            data[start:end].view(stored).astype(self.dtype)
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
        self._index.check()
        self._data.check()
        return found

    def __repr__(self) -> str:
        return f"<MegatronTokens {self._data.path!r}: {len(self):,} sequences of {self.dtype}>"
