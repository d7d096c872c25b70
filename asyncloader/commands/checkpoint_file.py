"""Reads the plain values of a checkpoint: a file of `torch.save` or `pickle`, or JSON. The file may be a stranger's.

Data path: file -> [checkpoint_file] -> loader_states.

Tensors are not read, and torch is not needed: the values of a checkpoint of `torch.save` lie in a pickle of their own.
Of a pickle no class is imported and no function is called, whatever it asks for: an `OtherObject` takes their place.
Its time and memory are not bounded.
"""

from __future__ import annotations

import codecs
import json
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

from asyncloader.commands.loader_states import OtherObject

_LEGACY = 0x1950A86A20F9469CFC6C  # by which files of `torch.save` begin that are no zip archives
_BEFORE = 2  # pickles that lie between that number and the values: a version, and facts about the machine


class InertUnpickler(pickle.Unpickler):
    """Unpickles plain values; all else becomes an `OtherObject`."""

    def find_class(self, _module: str, _name: str, /) -> Any:
        """Stand for a class or a function: nothing else can be called by a pickle."""
        return OtherObject

    def persistent_load(self, _identity: Any, /) -> Any:
        """Stand for a tensor's memory."""
        return None


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
            return _read_pickles(opened)
        except OSError:
            raise
        except Exception as error:  # `pickle` and `zipfile` raise many kinds, depending on where a file is damaged
            if begin.startswith((b"PK", pickle.PROTO)):
                why = f"it is damaged: {type(error).__name__}: {error}"
                raise ValueError(f"{file} is not a checkpoint that can be read: {why}") from None
            is_text = begin.isascii() and "".join(begin.decode().split()).isprintable()
            kind = "is text, and neither" if is_text else "is neither a file of torch.save,"
            raise ValueError(f"{file} {kind} JSON nor a pickle; it begins with {begin[:20]!r}") from None


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        why = "it nests too deep" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{file} is not JSON that can be read: {why}") from None


def _read_pickles(opened: IO[bytes]) -> Any:
    if zipfile.is_zipfile(opened):
        with zipfile.ZipFile(opened) as archive:
            found = [name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"]
            if not found:
                raise ValueError("the archive has no data.pkl")
            with archive.open(min(found, key=lambda name: name.count("/"))) as member:
                return _read_pickle(member)
    opened.seek(0)
    value = _read_pickle(opened)
    for _ in range(_BEFORE + 1 if value == _LEGACY else 0):
        value = _read_pickle(opened)
    return value


def _read_pickle(opened: IO[bytes]) -> Any:
    return InertUnpickler(opened, encoding="latin-1").load()
