"""The forms `on_disk_cache` and `end_caching`: the results of the parts between them are written to files, once.

Data path: graph -> [on_disk_cache] -> parts that download, decompress, ... -> [end_caching: files] -> paths -> graph.

An item that is not cached goes through the parts between on its own, while this process alone has the right to write
its files. Paths come in the order of the items, whatever is cached: a resumed epoch finds more files than it did the
first time, and gives the same paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import IO, Any, NoReturn

from torch.utils.data import IterDataPipe
from torch.utils.data.graph import traverse_dps

from asyncloader.dataloader2.datapipes.cache_files import CacheFiles, claim
from asyncloader.dataloader2.datapipes.forms import has_form, is_replicable
from asyncloader.dataloader2.graph.utils import list_dps, parts_of

_MODES = {"wb": "wb", "b": "wb", "w": "wt", "wt": "wt", "t": "wt"}


class OnDiskCacheHolder(IterDataPipe[Any]):
    """Form ``on_disk_cache``. Begins a cache: the parts up to ``end_caching`` run only for items that are not cached.

    Args:
        source_datapipe: is read item by item.
        filepath_fn: returns the path of an item's file; default None: the item is the path.
        hash_dict: hashes of files by their paths, in hexadecimal digits; default None: files are not compared. A file
            with another hash, or without a hash here, is not cached. Each epoch reads whole files to compare them.
        hash_type: ``"sha256"`` (default) or ``"md5"``.
        extra_check_fn: returns whether an item's file that exists at a path is valid; default None: it always is.

    Raises:
        ValueError: another type of hash.
        RuntimeError: it is read before ``end_caching`` was called.
    """

    def __init__(
        self,
        source_datapipe: Any,
        filepath_fn: Callable[[Any], str | os.PathLike[str]] | None = None,
        hash_dict: dict[str, str] | None = None,
        hash_type: str = "sha256",
        extra_check_fn: Callable[[str], bool] | None = None,
    ) -> None:
        self.source_datapipe = source_datapipe
        self.filepath_fn = filepath_fn
        self.files = CacheFiles(hash_dict, hash_type, extra_check_fn)
        self.ended = False
        self.missing: list[Any] = []  # the item that is being written: the parts between read it from here

    def __iter__(self) -> Iterator[Any]:
        if not self.ended:
            raise RuntimeError("Please call `end_caching()` before iteration.")
        yield from self.missing

    def __add__(self, other: Any) -> NoReturn:
        raise RuntimeError("`OnDiskCacheHolder` doesn't support add operation")


class EndOnDiskCacheHolder(IterDataPipe[str]):
    """Form ``end_caching``. Ends a cache: writes files, and gives the paths of all items' files, cached before or not.

    For each item the parts since ``on_disk_cache`` must give pairs of a path and a content: a single pair with the
    item's own path, or any number of pairs with other paths. They start again for each item. An item for which they
    give no pair is not cached. If several processes, ranks or jobs need the same item, one of them writes it, and the
    others wait for that.

    Args:
        datapipe: gives the pairs.
        mode: ``"wb"`` (default) or ``"wt"`` (UTF-8).
        filepath_fn: makes the path of the first element of a pair; default None: that element is the path.
        same_filepath_fn: take ``filepath_fn`` of ``on_disk_cache``; default False.
        skip_read: the second element of a pair is the content: bytes, or a string. Default False: it is an open file,
            or an iterable of such pieces, and is closed at its end.
        timeout: seconds to wait for another process that writes the item; default 300.

    Raises:
        ValueError: `filepath_fn` together with `same_filepath_fn`; another mode; a part between the two forms shares
            items among processes, or is not replicable; two files of an item have the same path.
        RuntimeError: no ``on_disk_cache`` comes before it, or it has an end already; a hash is wrong, or missing.
        TypeError: the datapipe gives no pairs, or contents of the other kind than `skip_read` asks for.
        TimeoutError: another process did not write the item in time.
    """

    def __init__(
        self,
        datapipe: Any,
        mode: str = "wb",
        filepath_fn: Callable[[Any], str | os.PathLike[str]] | None = None,
        *,
        same_filepath_fn: bool = False,
        skip_read: bool = False,
        timeout: float = 300,
    ) -> None:
        if filepath_fn is not None and same_filepath_fn:
            raise ValueError("`filepath_fn` is mutually exclusive with `same_filepath_fn`")
        if mode not in _MODES:
            raise ValueError(f"mode should be one of {', '.join(_MODES)}, not {mode!r}")
        self._holder = _holder_before(datapipe)
        self._holder.ended = True
        self.datapipe = datapipe
        self.mode = _MODES[mode]
        self.filepath_fn = self._holder.filepath_fn if same_filepath_fn else filepath_fn
        self.skip_read = skip_read
        self.timeout = timeout

    def set_timeout(self, timeout: float) -> None:
        """Set the seconds to wait for another process."""
        self.timeout = timeout

    def invalidate(self, before: int) -> None:
        """Have files that were written before a time count as not cached.

        Args:
            before: the time, in nanoseconds since 1970.
        """
        self._holder.files.valid_from = before

    def __iter__(self) -> Iterator[str]:
        find = self._holder.files.find
        for item in self._holder.source_datapipe:
            path = _path(item, self._holder.filepath_fn)
            files = find(path)
            if files is None:
                with claim(path, self.timeout):
                    # Again: another process may have written them during the wait for the claim.
                    files = find(path) or self._write_item(item, path)
            # Without the claim, so that no other process waits until this reader asks for the next item.
            yield from files

    def _write_item(self, item: Any, path: str) -> list[str]:
        """Have the parts between make an item's files, and write them. Returns their paths."""
        files: dict[str, None] = {}
        cache = self._holder.files
        self._holder.missing = [item]
        try:
            for pair in self.datapipe:
                if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                    raise TypeError(f"`end_caching` needs pairs of a path and its content, not {type(pair).__name__}")
                file = _path(pair[0], self.filepath_fn)
                if file in files:
                    raise ValueError(f"two files of {path} have the same path: {file}")
                cache.write(file, path, self.mode, partial(self._write, pair[1], file))
                files[file] = None
        finally:
            self._holder.missing = []
        cache.complete(path, list(files))
        return list(files)

    def _write(self, content: Any, file: str, opened: IO[Any]) -> None:
        whole = isinstance(content, (bytes, bytearray, memoryview, str))
        if whole != self.skip_read and not (isinstance(content, str) and self.mode == "wt"):
            raise TypeError(
                f"the content of {file} is {type(content).__name__}: `end_caching` takes bytes and strings with "
                "skip_read=True, and open files without it"
            )
        if whole:
            opened.write(content)
            return
        try:
            opened.writelines(content)
        finally:
            if callable(close := getattr(content, "close", None)):
                close()


def _path(value: Any, function: Callable[[Any], str | os.PathLike[str]] | None) -> str:
    path = os.fspath(value if function is None else function(value))
    if not isinstance(path, str):
        raise TypeError(f"a cached file's path should be a string, not {type(path).__name__}")
    return path


def _holder_before(datapipe: Any) -> OnDiskCacheHolder:
    """Return the nearest ``on_disk_cache`` without an end, and check the parts after it."""
    holders = [each for each in parts_of(datapipe) if isinstance(each, OnDiskCacheHolder)]
    for holder in holders:
        if not holder.ended:
            break
    else:
        if holders:
            raise RuntimeError("`end_caching` can only be invoked once per `OnDiskCacheHolder`")
        raise RuntimeError("Expected `OnDiskCacheHolder` existing in pipeline when `end_caching` is invoked")
    for each in list_dps(traverse_dps(datapipe), exclude_dps=[holder]):
        if not is_replicable(each) or any(has_form(each, form) for form in _SHARING):
            raise ValueError(
                f"{type(each).__name__} is between `on_disk_cache` and `end_caching`, where each item goes through "
                "alone: put it before or after them"
            )
    return holder


_SHARING = ("sharding_filter", "sharding_round_robin_dispatch")
