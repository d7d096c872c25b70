"""Reads the plain values of a checkpoint: a file of `torch.save` or `pickle`, or JSON. The file may be a stranger's.

Data path: file -> [checkpoint_file: pickle_values] -> state_words.

Tensors are not read, and torch is not needed: the values of a checkpoint lie in a pickle of their own.
"""

from __future__ import annotations

import codecs
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

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
        begin = opened.read(64)
        first = begin.removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        if not first:
            raise ValueError(f"{file} is empty")
        if first in (b"{", b"["):
            return _read_json(file)
        try:
            opened.seek(_values_at(opened) if zipfile.is_zipfile(opened) else 0)
            value = read_pickle(opened)
            for _ in range(_BEFORE + 1 if value == _LEGACY else 0):
                value = read_pickle(opened)
        # `zipfile` raises each of them, depending on where an archive is damaged; our own errors are the first.
        except (ValueError, OverflowError, NotImplementedError, zipfile.BadZipFile, struct.error) as error:
            if begin.startswith((b"PK", pickle.PROTO)):
                raise ValueError(f"{file} is not a checkpoint that can be read: {error}") from None
            is_text = begin.isascii() and "".join(begin.decode().split()).isprintable()
            kind = "is text, and neither" if is_text else "is neither a file of torch.save,"
            raise ValueError(f"{file} {kind} JSON nor a pickle; it begins with {begin[:20]!r}") from None
    return value


def _read_json(file: Path) -> Any:
    if file.stat().st_size > MOST_JSON:
        raise ValueError(f"{file} has more than {MOST_JSON >> 20} MiB of JSON")
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{file} is not JSON that can be read: {why}") from None


def _values_at(opened: BinaryIO) -> int:
    """Return the place of the values' pickle in a zip archive of `torch.save`."""
    with zipfile.ZipFile(opened) as archive:
        found = [each for each in archive.infolist() if each.filename.rpartition("/")[2] == "data.pkl"]
    if not found:
        raise ValueError("the archive has no data.pkl")
    member = min(found, key=lambda each: each.filename.count("/"))
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member.filename} in the archive is compressed, which that of torch.save never is")
    opened.seek(member.header_offset + _LENGTHS_AT)
    lengths: tuple[int, int] = struct.unpack("<HH", opened.read(4))
    return member.header_offset + _LOCAL_HEADER + sum(lengths)
