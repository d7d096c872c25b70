"""The files of `on_disk_cache`: which of them are complete, and how they are written.

Data path: cache_on_disk -> [cache_files: temporary file, check, rename] -> files.

Beside an item's file may lie:

    <path>.torchdata_list   the item became other files than this one: their paths, a line each, as in torchdata
    <path>.asyncloader_claim  while a process writes the files of this item (`file_claim`)
    <file>.<8 digits>.part  what is written now, or what a killed process left: the next one writes over it

A file gets its name when it is complete, and an item's list is written after all its files. Only a loss of power may
leave a file with less in it, which hashes reveal.
"""

# Names are strings, as users' functions give them.
# ruff: noqa: PTH105, PTH108, PTH113, PTH116, PTH123

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_HASHES = ("sha256", "md5")


class CacheFiles:
    """Finds and writes the files of a cache.

    Args:
        hashes: of each file by its path, in hexadecimal digits; None: files are not compared.
        hash_type: ``"sha256"`` or ``"md5"``.
        check: whether an item's own file is valid; None: it is.

    Attributes:
        valid_from: nanoseconds since 1970; what was written before counts as not cached. 0: everything is valid.

    Raises:
        ValueError: the type of hash is neither.
    """

    def __init__(self, hashes: dict[str, str] | None, hash_type: str, check: Callable[[str], bool] | None) -> None:
        if hashes is not None and hash_type not in _HASHES:
            raise ValueError(f"Invalid hash_type requested, should be one of {_HASHES}")
        self.valid_from = 0
        self._hashes = hashes
        self._hash_type = hash_type
        self._check = check

    def found(self, path: str) -> list[str] | None:
        """The complete files of the item whose own path this is; None: it is not cached."""
        listed = self._listed(path)
        if listed is not None:  # the path itself is then no file of the cache, or an old one
            return listed or None
        return [path] if self._valid(path) and (self._check is None or self._check(path)) else None

    def _listed(self, path: str) -> list[str] | None:
        """The files in its list, none if one of them is missing; None: it has no list."""
        try:
            with open(_list_of(path), encoding="utf-8", errors="surrogateescape") as lines:
                files = [line.removesuffix("\n") for line in lines]
        except FileNotFoundError:
            return None
        return files if self._recent(_list_of(path)) and all(map(self._valid, files)) else []

    def _valid(self, file: str) -> bool:
        if not os.path.isfile(file) or not self._recent(file):
            return False
        return self._hashes is None or self._hash(file) == self._hashes.get(file)

    def _recent(self, file: str) -> bool:
        return not self.valid_from or os.stat(file).st_mtime_ns >= self.valid_from

    def _hash(self, file: str) -> str:
        with open(file, "rb") as content:
            return hashlib.file_digest(content, self._hash_type).hexdigest()

    def write(
        self, file: str, item: str, mode: str, write: Callable[[IO[Any]], object], errors: str | None = None
    ) -> None:
        """Write one of the files of an item, whose right to be written the caller has.

        Args:
            file: its path.
            item: the item's own path.
            mode: ``"wb"`` or ``"wt"``.
            write: writes the content to the open file.
            errors: of `open`.

        Raises:
            RuntimeError: the hash is another one, or there is none for the file. The file is as it was before.
        """
        if "\n" in file:
            raise ValueError(f"a cached file's path must be one line, not {file!r}")
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        # Items that become files of the same name do not write to the same temporary one.
        part = f"{file}.{hashlib.blake2b(os.fsencode(item), digest_size=4).hexdigest()}.part"
        try:
            with open(part, mode, encoding=None if "b" in mode else "utf-8", errors=errors) as opened:
                write(opened)
            self._compare(part, file)
            now = max(time.time_ns(), self.valid_from or 0)  # the clock may have been put back, or another machine's
            os.utime(part, ns=(now, now))  # the kernel's own time stamps are some milliseconds late
            os.replace(part, file)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise

    def _compare(self, part: str, file: str) -> None:
        if self._hashes is None:
            return
        if file not in self._hashes:
            raise RuntimeError(f"Unspecified hash for file {file}")
        found = self._hash(part)
        if found != self._hashes[file]:
            raise RuntimeError(
                f"The computed hash {found} of {file} does not match the expected hash {self._hashes[file]}. It was "
                "not kept: mend its source, or `hash_dict`"
            )

    def complete(self, item: str, files: list[str]) -> None:
        """Say that these are the files of the item, and all of them; without files it is not cached."""
        if files == [item]:
            with suppress(FileNotFoundError):
                os.unlink(_list_of(item))  # of an earlier time, when it became others
        elif files:
            lines = "".join(f"{file}\n" for file in files)
            write = CacheFiles(None, "", None).write
            write(_list_of(item), item, "wt", lambda opened: opened.write(lines), "surrogateescape")  # as names are


def _list_of(path: str) -> str:
    return f"{path}.torchdata_list"
