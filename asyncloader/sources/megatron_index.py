r"""The index of Megatron's pairs of files: what its header says, and whether it fits its files. Pure.

The format, as Megatron Core's documentation of its data pipeline has it, little-endian: the 9 bytes ``MMIDIDX\0\0``;
the version, 1, in 8 bytes; a code of the tokens' type in 1; the number of sequences and that of document boundaries, in
8 each. Then for each sequence its tokens (int32), for each its byte in the data (int64), and the document boundaries
(int64), which are numbers of sequences: the first is 0, the last the number of all. Multimodal data have a mode (int8)
for each sequence after that.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np

from asyncloader.errors import ShardError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size

_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = (6, 7)

SIZES, POINTERS, BOUNDARIES, MODES = (np.dtype(each) for each in ("<i4", "<i8", "<i8", "i1"))

_BLOCK = 1 << 20  # sequences that are checked at a time


class IndexLayout(NamedTuple):
    """Where the parts of an index are.

    Attributes:
        dtype: the tokens' type.
        sequences: their number.
        boundaries: the number of document boundaries.
        has_modes: whether each sequence has a mode.
    """

    dtype: np.dtype[Any]
    sequences: int
    boundaries: int
    has_modes: bool

    @property
    def pointers_at(self) -> int:
        """The byte of the first pointer."""
        return HEADER_BYTES + self.sequences * SIZES.itemsize

    @property
    def boundaries_at(self) -> int:
        """The byte of the first document boundary."""
        return self.pointers_at + self.sequences * POINTERS.itemsize

    @property
    def modes_at(self) -> int:
        """The byte of the first mode; the end of an index without modes."""
        return self.boundaries_at + self.boundaries * BOUNDARIES.itemsize


def read_layout(header: bytes, size: int, url: str) -> IndexLayout:
    """Return the layout that a header says.

    Args:
        header: the first `HEADER_BYTES` bytes of the index; fewer of a file that is shorter.
        size: bytes of the index.
        url: its name, for errors.

    Raises:
        ShardError: it is no such index, or its size is not that of the header.
    """
    if header[: len(_MAGIC)] != _MAGIC:
        raise ShardError("this is no Megatron index, which begins with MMIDIDX", url=url, offset=0)
    if len(header) < HEADER_BYTES:
        raise ShardError(f"the index was cut: {size:,} bytes hold no header", url=url, offset=size)
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1:
        raise ShardError(f"an index of version {version:,}, where only 1 is known", url=url, offset=len(_MAGIC))
    if code not in _TYPES:
        kind = "of floating-point numbers, which are no tokens" if code in _FLOATS else "unknown"
        raise ShardError(f"the type with code {code} is {kind}", url=url, offset=len(_MAGIC) + 8)
    # Python's integers: nothing is allocated or mapped for these numbers before they fit the file.
    layout = IndexLayout(np.dtype(_TYPES[code]).newbyteorder("<"), sequences, boundaries, has_modes=False)
    if size == layout.modes_at:
        return layout
    if size == layout.modes_at + sequences:
        return layout._replace(has_modes=True)
    raise ShardError(
        f"an index of {sequences:,} sequences and {boundaries:,} document boundaries has {layout.modes_at:,} bytes, "
        f"and this file {size:,}: it was cut, or is no index",
        url=url,
        offset=min(size, layout.modes_at),
    )


def check_index(
    layout: IndexLayout,
    sizes: np.ndarray[Any, Any],
    pointers: np.ndarray[Any, Any],
    boundaries: np.ndarray[Any, Any],
    data_size: int,
    url: str,
) -> None:
    """Check that all sequences lie in the data, and that documents are in order.

    Args:
        layout: of the index.
        sizes: the tokens of each sequence.
        pointers: the byte of each sequence in the data.
        boundaries: of the documents.
        data_size: bytes of the data.
        url: the index's name, for errors.

    Raises:
        ShardError: they do not.
    """
    itemsize = layout.dtype.itemsize
    for first in range(0, layout.sequences, _BLOCK):
        size, at = sizes[first : first + _BLOCK], pointers[first : first + _BLOCK]
        # Not `at + size * itemsize <= data_size`, which a pointer near 2**63 would overflow.
        room = data_size - size.astype(np.int64) * itemsize
        wrong = (size < 0) | (at < 0) | (at > room) | (at % itemsize != 0)
        if wrong.any():
            number = int(np.argmax(wrong))
            raise ShardError(
                f"sequence {first + number:,} is said to have {int(size[number]):,} tokens from byte "
                f"{int(at[number]):,}, and the data {data_size:,} bytes: data and index are not of one pair, or one "
                "was cut",
                url=url,
                offset=layout.pointers_at + (first + number) * POINTERS.itemsize,
            )
    if not layout.boundaries:
        if layout.sequences:
            raise ShardError("the index has sequences, but no documents", url=url, offset=layout.boundaries_at)
        return
    ordered = all(
        (np.diff(boundaries[first : first + _BLOCK + 1]) >= 0).all() for first in range(0, layout.boundaries, _BLOCK)
    )
    if not ordered or int(boundaries[0]) != 0 or int(boundaries[-1]) != layout.sequences:
        raise ShardError(
            f"the document boundaries do not ascend from 0 to the {layout.sequences:,} sequences",
            url=url,
            offset=layout.boundaries_at,
        )
