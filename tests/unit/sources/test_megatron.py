"""`MegatronTokens` reads what the format's description says, and refuses whatever does not fit."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncloader import MegatronTokens
from asyncloader.errors import ShardError
from asyncloader.sources.megatron import HEADER_BYTES

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_pair(
    prefix: Path, sequences: list[list[int]], dtype: str, *, documents: list[int] | None = None, modes: bool = False
) -> None:
    """Write a pair of files, as the format is described."""
    sizes = [len(each) for each in sequences]
    starts = np.cumsum([0, *sizes])[:-1] * np.dtype(dtype).itemsize
    documents = [*range(len(sequences) + 1)] if documents is None else documents
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, CODES[dtype], len(sizes), len(documents))
    index += np.array(sizes, "<i4").tobytes() + np.array(starts, "<i8").tobytes() + np.array(documents, "<i8").tobytes()
    index += bytes(range(len(sizes))) if modes else b""
    prefix.with_suffix(".idx").write_bytes(index)
    tokens = [token for each in sequences for token in each]
    prefix.with_suffix(".bin").write_bytes(np.array(tokens, np.dtype(dtype).newbyteorder("<")).tobytes())


@given(
    sequences=st.lists(st.lists(st.integers(0, 100), max_size=6), max_size=12),
    dtype=st.sampled_from([*CODES]),
    modes=st.booleans(),
    data=st.data(),
)
def test_any_pair(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]], dtype: str, modes: bool, data: Any
) -> None:
    """Sequences, their sizes, the documents and the modes are what was written, also in an unpickled copy."""
    prefix = tmp_path_factory.mktemp("pair") / "corpus"
    inner = sorted(data.draw(st.lists(st.integers(0, len(sequences)), max_size=4)))
    write_pair(prefix, sequences, dtype, documents=[0, *inner, len(sequences)], modes=modes)
    for read in (MegatronTokens(prefix), pickle.loads(pickle.dumps(MegatronTokens(prefix)))):
        assert len(read) == len(sequences)
        indices = [*range(-len(sequences), len(sequences))]
        found = read.__getitems__(indices)
        assert [each.tolist() for each in found] == [sequences[i] for i in indices]
        assert all(each.dtype == dtype and each.flags.writeable for each in found)
        assert read.sizes.tolist() == [len(each) for each in sequences]
        assert read.documents.tolist() == [0, *inner, len(sequences)]
        assert (None if read.modes is None else read.modes.tolist()) == (
            [*range(len(read))] if modes and len(read) else None
        )


def damaged(index: bytes, at: int, value: bytes) -> bytes:
    return index[:at] + value + index[at + len(value) :]


SEQUENCES = [[1, 2, 3], [4], [5, 6]]
SIZES, POINTERS, DOCUMENTS = HEADER_BYTES, HEADER_BYTES + 12, HEADER_BYTES + 12 + 24


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"X", "no Megatron index"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x07", "tokens of type 7"),
        (18, struct.pack("<Q", 2**64 - 1), "18,446,744,073,709,551,615 sequences"),
        (26, struct.pack("<Q", 2**62), "document boundaries has"),
        (18, struct.pack("<Q", 4), "4 sequences"),
        (SIZES, struct.pack("<i", -1), "sequence 0 is said to have -1 tokens"),
        (SIZES + 8, struct.pack("<i", 2**31 - 1), "sequence 2 is said to have 2,147,483,647"),
        (POINTERS + 8, struct.pack("<q", -2), "sequence 1 .* from byte -2"),
        (POINTERS + 8, struct.pack("<q", 2**63 - 2), "sequence 1"),
        (POINTERS + 8, struct.pack("<q", 5), "sequence 1"),  # in the middle of a token
        (POINTERS + 16, struct.pack("<q", 10), "sequence 2"),  # behind the end
        (DOCUMENTS, struct.pack("<q", 1), "do not ascend from 0"),
        (DOCUMENTS + 8, struct.pack("<q", 3), "do not ascend"),
        (DOCUMENTS + 24, struct.pack("<q", 2), "do not ascend"),
    ],
)
def test_damaged_indices(tmp_path: Path, at: int, value: bytes, said: str) -> None:
    """Each field is checked; the error has the file."""
    prefix = tmp_path / "corpus"
    write_pair(prefix, SEQUENCES, "uint16")
    file = prefix.with_suffix(".idx")
    file.write_bytes(damaged(file.read_bytes(), at, value))
    with pytest.raises(ShardError, match=said) as caught:
        MegatronTokens(prefix)
    assert caught.value.url == str(file)


@given(cut=st.integers(1, 120), byte=st.integers(0, 101), value=st.integers(0, 255))
def test_hostile_bytes(tmp_path_factory: pytest.TempPathFactory, cut: int, byte: int, value: int) -> None:
    """A file that was cut anywhere is refused; with any byte changed it is refused, or read within its data."""
    prefix = tmp_path_factory.mktemp("pair") / "corpus"
    write_pair(prefix, SEQUENCES, "uint16")
    index, data = (prefix.with_suffix(suffix) for suffix in (".idx", ".bin"))
    whole = index.read_bytes()
    index.write_bytes(whole[: -min(cut, len(whole))])
    with pytest.raises(ShardError):
        MegatronTokens(prefix)
    index.write_bytes(damaged(whole, min(byte, len(whole) - 1), bytes([value])))
    try:
        read = MegatronTokens(prefix)
        found = read.__getitems__(range(len(read)))
    except ShardError:
        pass
    else:
        assert sum(map(len, found)) == read.sizes.sum()
    index.write_bytes(whole)
    data.write_bytes(data.read_bytes()[: -min(cut, 12)])
    with pytest.raises(ShardError, match="not of one pair"):
        MegatronTokens(prefix)


def test_files_that_change_and_files_that_are_missing(tmp_path: Path) -> None:
    """A change of either file is an error before its map is read."""
    prefix = tmp_path / "corpus"
    with pytest.raises(FileNotFoundError):
        MegatronTokens(prefix)
    for suffix in (".idx", ".bin"):
        write_pair(prefix, SEQUENCES, "int32")
        read = MegatronTokens(f"{prefix}{suffix}")
        assert read[1].tolist() == [4]
        os.truncate(prefix.with_suffix(suffix), 3)
        with pytest.raises(ShardError, match="the file has changed"):
            read[1]
