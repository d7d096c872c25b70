"""Reads the plain values of a checkpoint: a file of `torch.save` or `pickle`, or JSON. The file may be a stranger's.

Data path: file -> [checkpoint_file: pickle_values] -> state_words.

Tensors are not read, and torch is not needed: the values of a checkpoint lie in a pickle of their own.
"""

from __future__ import annotations

import codecs
import json
import mmap
import struct
import zipfile
from pathlib import Path
from typing import Any

from asyncloader.commands.pickle_values import read_pickle

MOST_JSON = 64 << 20
"""Bytes of JSON. As Python's values they may take 25 times the memory."""

_LOCAL_HEADER, _LENGTHS_AT = 30, 26  # of a member of a zip archive: its bytes, and where the lengths of names stand
_LEGACY = 0x1950A86A20F9469CFC6C  # by which files of `torch.save` begin that are no zip archives
_BEFORE = 2  # pickles that lie between that number and the values: a version, and facts about the machine


def read_checkpoint(file: Path) -> Any:
    """Return the values of a checkpoint, with `OtherObject`s in the place of tensors and other objects.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no checkpoint, or is damaged.
    """
    with file.open("rb") as opened:
        begins = opened.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        if not begins:
            raise ValueError(f"{file} is empty")
        if begins in (b"{", b"["):
            return _read_json(file)
        try:
            with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as memory:
                if zipfile.is_zipfile(file):
                    memory.seek(_values_at(file, memory))
                value = read_pickle(memory)
                for _ in range(_BEFORE + 1 if value == _LEGACY else 0):
                    value = read_pickle(memory)
                return value
        # `zipfile` raises each of them, depending on where an archive is damaged; our own errors are the first.
        except (ValueError, OverflowError, NotImplementedError, zipfile.BadZipFile, struct.error) as error:
            raise ValueError(f"{file} is not a checkpoint that can be read: {error}") from None


def _read_json(file: Path) -> Any:
    if file.stat().st_size > MOST_JSON:
        raise ValueError(f"{file} has more than {MOST_JSON >> 20} MiB of JSON")
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{file} is not JSON that can be read: {why}") from None


def _values_at(file: Path, memory: mmap.mmap) -> int:
    """Return the place of the values' pickle in a zip archive of `torch.save`."""
    with zipfile.ZipFile(file) as archive:
        found = [each for each in archive.infolist() if each.filename.rpartition("/")[2] == "data.pkl"]
    if not found:
        raise ValueError("the archive has no data.pkl")
    member = min(found, key=lambda each: each.filename.count("/"))
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member.filename} in the archive is compressed, which that of torch.save never is")
    lengths: tuple[int, int] = struct.unpack_from("<HH", memory, member.header_offset + _LENGTHS_AT)
    return member.header_offset + _LOCAL_HEADER + sum(lengths)
