"""The rows of a Lance dataset, as a map dataset.

Data path: files or a store -> lance -> [lance_table] -> worker.

Lance has threads, which a forked child does not have. So the trainer, which only asks how many rows there are, asks
that in a process of its own, and Lance is opened where rows are read. A child that was forked from a process which has
used Lance is refused, because Lance may hang or crash there.
"""

from __future__ import annotations

import importlib
import json
import operator
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from asyncloader.base.process_hooks import in_forked_child
from asyncloader.formats.rows import values
from asyncloader.sources import lance_version
from asyncloader.sources.tokens import Batched, positions
from asyncloader.transports import ReadFailed
from asyncloader.workers.fetch.dataset_kinds import DigestedDataset

_inherited = False
"""Whether this process was forked from one that had imported lance."""


class _LanceVersion(NamedTuple):
    """A version of a dataset: its number, its number of rows, when it was written, and the columns of blobs to read."""

    version: int
    rows: int
    written: str
    blobs: tuple[str, ...]


class LanceTable(Batched[dict[str, Any]], DigestedDataset):
    """The rows of a Lance dataset.

        data = LanceTable("s3://bucket/images.lance", columns=["image", "label"])
        row = data[0]    # {"image": ..., "label": ...}

    It needs ``pip install 'asyncloader[lance]'``. A row is a dictionary with the values that a row of Parquet has:
    fixed-size lists of numbers are arrays of numpy, all other types are Python's; blobs are bytes. All rows of a batch
    are read by one call of Lance, and one for each column of blobs.

    The newest version is looked up once, when the length or a row is first asked for, and the copies in the workers
    read that version, whatever is written meanwhile. So do several ranks, and a resumed run, if you name the `version`;
    else a state of another version is refused within an epoch.

    Lance cannot be used in a process that was forked from one in which it was used. Reading by worker processes does
    not use it in the trainer. If the trainer uses it itself (it has written the dataset, or has read it without
    workers), start the workers with ``multiprocessing_context="forkserver"`` or ``"spawn"``.

    Args:
        uri: the dataset: a local folder, or an address of a store that Lance reads.
        columns: names of the columns to read; None: all.
        version: number of the version; None: the newest.
        storage_options: of the store, as Lance takes them.

    Raises:
        ValueError: no column is named.
        ImportError: lance is not installed.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        version: int | None = None,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        if find_spec("lance") is None:
            raise ImportError(
                "LanceTable reads rows by lance, which is not installed: pip install 'asyncloader[lance]'"
            )
        uri = os.fspath(uri)
        self.uri = uri if "://" in uri else os.path.abspath(uri)  # noqa: PTH100 - a str is kept
        if isinstance(columns, str) or (columns is not None and not len(columns)):
            raise ValueError(f"columns={columns!r} names no column: give a list of names, or None for all columns")
        self.columns = None if columns is None else list(columns)
        self.version = None if version is None else operator.index(version)
        self._storage_options = None if storage_options is None else dict(storage_options)
        self._description: _LanceVersion | None = None
        self._opened: tuple[int, Any] | None = None  # the process's, and the version that Lance has opened
        in_forked_child(_note_fork)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_opened": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        in_forked_child(_note_fork)

    def __len__(self) -> int:
        """Number of rows of the version.

        Raises:
            ReadFailed: the dataset, the version or a column does not exist, or cannot be read.
        """
        return self._described().rows

    def data_digest(self, *, find: bool) -> str | None:
        """Return the version, and when it was written, as `DigestedDataset.data_digest`."""
        found = self._described() if find else self._description
        return None if found is None else repr((found.version, found.written))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of these indices, which may repeat, by one call of Lance.

        Raises:
            IndexError: an index is out of range.
            ReadFailed: a row cannot be read; or Lance cannot be used in this process, because it was forked.
        """
        found = self._described()
        numbers = positions(indices, found.rows)
        if not len(numbers):
            return []
        asked = numbers.tolist()
        try:
            dataset = self._open(found)
            table = dataset.take(asked, columns=self.columns)
            blobs = {
                name: [blob for _, blob in dataset.read_blobs(name, indices=asked, preserve_order=True)]
                for name in found.blobs
            }
        except ReadFailed:
            raise
        except BaseException as error:
            # Damaged files may cause a panic of Rust, which is no `Exception`: the worker would end by it.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ReadFailed(f"rows of {self.uri} cannot be read: {type(error).__name__}: {error}") from error
        names = table.column_names
        columns = [
            blobs[name] if name in blobs else values(column.combine_chunks())
            for name, column in zip(names, table.columns, strict=True)
        ]
        lists = [each.tolist() if isinstance(each, np.ndarray) and each.ndim == 1 else each for each in columns]
        return [
            {name: _alone(column[place]) for name, column in zip(names, lists, strict=True)}
            for place in range(len(asked))
        ]

    def _open(self, described: _LanceVersion) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            found = _lance().dataset(self.uri, version=described.version, storage_options=self._storage_options)
            if (now := lance_version.written(found)) != described.written:
                raise ReadFailed(
                    f"{self.uri} has been made anew: its version {described.version} was written at "
                    f"{described.written} when its rows were counted, and is of {now}. Make the LanceTable anew"
                )
            self._opened = os.getpid(), found  # another thread may do so at the same time: both read the same
        return self._opened[1]

    def _described(self) -> _LanceVersion:
        if self._description is None:
            found = _describe({"uri": self.uri, "version": self.version, "storage_options": self._storage_options})
            if missing := sorted({*(self.columns or [])} - {*found["names"]}):
                raise ReadFailed(f"{self.uri} has no column {missing[0]!r}; it has {', '.join(found['names'])}")
            read = found["names"] if self.columns is None else self.columns
            if inside := [name for name in read if name in found["hold_blobs"]]:
                raise ReadFailed(f"{self.uri} has blobs inside {inside[0]!r}, which cannot be read: name other columns")
            blobs = tuple(name for name in found["blobs"] if name in read)
            self._description = _LanceVersion(found["version"], found["rows"], found["written"], blobs)
        return self._description

    def __repr__(self) -> str:
        found = self._description
        described = "" if found is None else f", version {found.version}: {found.rows:,} rows"
        return f"<LanceTable {self.uri!r}{described}>"


def _alone(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value  # a row of an array would hold the others


def _note_fork() -> None:
    global _inherited  # noqa: PLW0603 - one fact about one process
    _inherited = "lance" in sys.modules


def _lance() -> Any:
    """Import lance.

    Raises:
        ReadFailed: this process was forked from one that has imported it.
    """
    if _inherited:
        raise ReadFailed(
            "this process was forked from one that had used lance, whose threads exist only there: a read might hang "
            'or crash. Start the workers with multiprocessing_context="forkserver" or "spawn", or do not use lance in '
            "the trainer"
        )
    return importlib.import_module("lance")


def _describe(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of `lance_version.describe`, from a process that ends: Lance is not used in this one."""
    ended = subprocess.run(
        [sys.executable, "-P", lance_version.__file__],  # without its folder, whose modules would hide others
        input=json.dumps({**asked, "path": sys.path}),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        reason = (ended.stderr.strip().splitlines() or [f"its process ended with {ended.returncode}"])[-1]
        raise ReadFailed(f"{asked['uri']} cannot be read by lance: {reason}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found
