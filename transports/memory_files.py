"""Reads parts of a file of a local disk as far as memory has them, in the loop's thread; the file stays open.

Data path: file -> [memory_files: open_files, page_cache] -> dataset.

To open a file takes as long as to read several samples. A file that is open is asked for its status after each call,
which says whether it was modified, or replaced: then it has lost its name. A link in its name, or a folder, may change
without a trace in the file: so it is opened anew once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from asyncloader.transports.local import PinnedFile
from asyncloader.transports.open_files import OpenFile, OpenFiles, use_ranges

_R = TypeVar("_R")


class MemoryFile:
    """What memory has of one file.

    Args:
        pinned: reads the file. Its answers and those of this object are of one version.
        etag: of the version that is wanted. Default: any.
    """

    def __init__(self, pinned: PinnedFile, etag: str | None = None) -> None:
        self._pinned = pinned
        self._etag = etag
        self._name = (pinned.files.root, pinned.path)  # in `OpenFiles`

    @property
    def local(self) -> bool:
        """Whether `use_local` may find something: the system says what memory has of the file."""
        return self._pinned.files.answers_at_once

    def use_local(
        self,
        ranges: Sequence[tuple[int, int]],
        use: Callable[[bytes | OpenFile, int, int, int], _R],
        files: OpenFiles,
    ) -> list[_R | None]:
        """Call a function with the bytes of each range that memory has. Never waits for a disk.

        Args:
            ranges: as of `use_ranges`.
            use: as there.
            files: keeps the file open.

        Returns:
            For each range what `use` returned, or None: the range must be read by the pinned reader, because memory
            does not have it, or the file has changed, or cannot be read.

        Raises:
            The errors of `use`, except EntryLost.
        """
        file = self._open(files)
        if file is None:
            return [None] * len(ranges)
        size = file.status.st_size

        def find(_: int, stop: int) -> tuple[OpenFile | None, int, int]:
            return (file, 0, size) if stop <= size else (None, 0, -1)

        try:
            results = use_ranges(ranges, use, find)
        except Exception:
            if self._is_unchanged(file):
                raise
        else:
            # After the reads: the file may have been modified in place during them.
            if self._is_unchanged(file):
                return results
        files.drop(self._name)
        return [None] * len(ranges)

    def is_current(self, files: OpenFiles) -> bool:
        """Return whether the file is of the version that is wanted, as its status says; False also if it is not known
        without a wait: the pinned reader says more. `files` keeps the file open.
        """
        file = self._open(files)
        if file is None or self._is_unchanged(file):
            return file is not None
        files.drop(self._name)
        return False

    def _open(self, files: OpenFiles) -> OpenFile | None:
        file = files.find(self._name)
        if file is None:
            descriptor = self._pinned.open_at_once()
            if descriptor is None:
                return None
            file = _KeptFile(descriptor, self._pinned.path)
            if not (self._pinned.is_of_version(file.status) and self._pinned.may_be(self._etag)):
                return None
            files.keep(self._name, file)
        return file if self._pinned.is_of_version(file.status) else None

    def _is_unchanged(self, file: OpenFile) -> bool:
        now = file.current_status()
        return now.st_nlink == file.status.st_nlink and self._pinned.is_of_version(now)


class _KeptFile(OpenFile):
    """A file that is open. Reads return what memory has, and raise EntryLost for the rest."""

    __slots__ = ()

    def read(self, start: int, length: int) -> bytes:
        return self.read_at_once(start, length)

    def is_there(self) -> bool:
        """Return False, which has it opened anew."""
        return False
