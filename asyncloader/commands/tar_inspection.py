"""Finds what a reader of a tar shard passes over without an error, and so leaves out of samples or makes two of one.

Data path: remote.reading -> [tar_inspection: formats.tar] -> shard_inspection.
"""

from __future__ import annotations

from asyncloader.formats import CompressedReader, Located, OnBad, ShardError, ShardFormat, ShardReader, TarReader
from asyncloader.formats.compressed import decoder
from asyncloader.formats.tar import split_name

_LINKS = {b"1": ("a hard", "--hard-dereference"), b"2": ("a symbolic", "--dereference")}


class TarInspector(TarReader):
    """Reads a whole archive like `TarReader`, and the bytes behind its end. Reports also, and goes on: files of one
    sample that are not together, links in place of files, and bytes behind the end of the archive.
    """

    def __init__(self, url: str, report: OnBad) -> None:
        super().__init__(url, on_bad=report)
        self._report = report
        self._keys: set[str] = set()
        self._begin = 0  # of the sample
        self._fed = 0
        self._behind = False  # bytes behind the end have been reported

    @property
    def done(self) -> bool:
        """Always False: what follows the end is looked at, too."""
        return False

    def feed(self, chunk: bytes, /) -> list[Located]:
        """Take the next bytes, like `ShardReader.feed`."""
        found = super().feed(chunk)
        self._fed += len(chunk)
        if self._done and not self._behind:
            rest = chunk[max(0, len(chunk) - (self._fed - self._at)) :]
            if data := rest.lstrip(b"\0"):
                self._behind = True
                self._note(
                    "more than zeros follows the end of the archive, and is not read: archives are joined by "
                    "tar --concatenate, not by cat",
                    self._fed - len(data),
                )
        return found

    def _flush(self, resume: int) -> None:
        if self._sample is not None:
            if self._key in self._keys:
                self._note(
                    f"the files of sample {self._key!r} are not together, so it is read as several samples: pack them "
                    "sorted by name, as tar --sort=name does",
                    self._begin,
                )
            self._keys.add(self._key)
        super()._flush(resume)
        self._begin = resume

    def _pass_over(self, name: str, kind: bytes, offset: int) -> None:
        if kind in _LINKS and split_name(name) is not None:
            which, option = _LINKS[kind]
            self._note(f"{name!r} is {which} link, whose sample lacks this file: pack files with tar {option}", offset)

    def _note(self, text: str, offset: int) -> None:
        self._report(ShardError(text, url=self._url, offset=offset))


def open_inspector(url: str, format: ShardFormat, report: OnBad) -> ShardReader:
    """Make the inspector of a tar shard, which may be compressed. It calls `report` with what it finds."""
    inspector = TarInspector(url, report)
    return inspector if format.compression is None else CompressedReader(url, inspector, decoder(format.compression))
