"""`RemoteMapDataset`: any sample of shards in a remote store, by its number.

Data path: sampler -> numbers -> [dataset: shard_reader] -> decode, collate.

The process that asks for a length finds the shards and indexes them (`prepare`); its copies in the workers know where
each sample is, and read those that they are asked for.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from operator import index as as_index
from types import TracebackType
from typing import Any, Self

import numpy as np
from torch.utils.data import Dataset

from asyncloader.base.bridge import in_thread, run_in_thread
from asyncloader.base.sizes import Size, optional_size, size
from asyncloader.errors import NoEffectWarning
from asyncloader.formats import MAX_SAMPLE_BYTES, Sample, ShardFormat
from asyncloader.remote.catalog import file_names
from asyncloader.remote.discovery import find_shards
from asyncloader.remote.random_access.host_files import HostFiles
from asyncloader.remote.random_access.indexing import Indexer, SampleCatalog, index_all
from asyncloader.remote.random_access.shard_reader import THREADS, ShardsReader
from asyncloader.remote.reading import READ_AHEAD
from asyncloader.remote.stores import LoopStores, LoopUse, Stores, names_of
from asyncloader.transports import Transport
from asyncloader.transports.blocking import BlockingPool
from asyncloader.transports.open_files import OpenFiles
from asyncloader.workers.fetch.dataset_kinds import DigestedDataset


class RemoteMapDataset(Dataset[Any], DigestedDataset):
    """The samples of shards in a remote store as a map dataset: tar (WebDataset's naming), JSON lines, Parquet, MDS,
    TFRecord.

    ``len(dataset)`` is the number of samples, ``await dataset[i]`` one of them, ``await dataset.__getitems__(indices)``
    several, with one request for those that lie close together. A sample is the dictionary that `RemoteIterableDataset`
    reads: ``__key__`` (str), ``__url__`` (str) and its fields. Samples are numbered in the order of the shards.

    A loader shuffles all samples with its ``shuffle=True``, and everything that it promises of map datasets holds: with
    ``seed=`` the same batches on any workers and ranks, states of a few numbers. A state that was saved within an epoch
    is refused if the shards have changed since: their names, sizes or numbers of samples, or a branch's commit.

    MDS has tables of its samples, Parquet of its row groups. A shard of another format is read once, whole, when the
    length is first asked for, unless an index lies in the `cache_dir`, or beside the shard (`write_shards`,
    `index_shards`). An index in the cache that is of another version of the shard is made again; one beside the shard
    is refused with a `ShardError`.

    A compressed shard, and a row group of Parquet, can only be decoded whole: one process of the host does it, and all
    of them read the result from a file. With random access to many of them, their files must fit into `cache_bytes`, or
    they are decoded again and again. A compressed shard may have 4 GiB after decompression.

    A bad sample has a number, too: reading it raises its `ShardError`, and the loader's `on_error` applies. One number
    stands for all that cannot be read of a shard. Of a compressed shard that is damaged, no sample can be read.

    Use it with asyncloader's loaders, or alone; within ``async with dataset`` connections are kept open. `prepare` does
    in the running loop what ``len()`` waits for.

    Args:
        urls, transport, columns, storage_options, cache_revalidate, read_ahead: as of `RemoteIterableDataset`.
        format: as there, but no function.
        cache_dir: directory in which shards are cached in blocks of 1 MiB, with decoded shards and row groups, and
            indexes. None: shards are not cached, and decoded ones and indexes lie in a directory for temporary files
            until the process that made the dataset ends. Processes of several hosts each need their own.
        cache_bytes: maximum size of that directory, in bytes or as a text (``"200GB"``), without the indexes, which
            have 4 bytes for each sample. None: no limit; of a temporary directory, half of the space that is free.
        max_sample_bytes: refuse a sample with more (decompressed) bytes; default ``"1GiB"``.

    Raises:
        ValueError: an argument is out of range, or incompatible with another.
        TypeError: `format` is a function.
    """

    def __init__(
        self,
        urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        *,
        format: str | ShardFormat | None = None,
        transport: Transport | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: Size | None = None,
        cache_revalidate: bool = True,
        max_sample_bytes: Size = MAX_SAMPLE_BYTES,
        read_ahead: Size = READ_AHEAD,
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if callable(format) and not isinstance(format, ShardFormat):
            raise TypeError(
                f"format={format!r} is a reader of one's own, which says nothing of where samples begin: read these "
                "shards by a RemoteIterableDataset"
            )
        self.urls = urls if isinstance(urls, str | os.PathLike) else list(urls)
        self.format = format
        self.max_sample_bytes = size("max_sample_bytes", max_sample_bytes)
        self.read_ahead = size("read_ahead", read_ahead)
        self.columns = columns
        if cache_dir is None and not cache_revalidate:
            warnings.warn("cache_revalidate= does nothing without cache_dir=", NoEffectWarning, stacklevel=2)
        self._stores = LoopStores(
            Stores(
                storage_options,
                transport=transport,
                cache_dir=cache_dir if transport is None else None,
                cache_bytes=None if cache_dir is None else cache_bytes,
                cache_revalidate=cache_revalidate,
            )
        )
        place = None if cache_dir is None else os.path.abspath(os.fspath(cache_dir))  # noqa: PTH100 - no I/O
        self._open_files = OpenFiles()
        self._files = HostFiles(place, optional_size("cache_bytes", cache_bytes), self._open_files)
        self._catalog: SampleCatalog | None = None

    def __repr__(self) -> str:
        catalog = self._catalog
        found = "" if catalog is None else f", {catalog.starts[-1]} samples in {len(catalog.shards)} shards"
        return f"<RemoteMapDataset {self.urls!r}{found}>"

    def __len__(self) -> int:
        """Number of samples in all shards. Blocks: finds and indexes the shards, once. Raises the errors of
        `prepare`.
        """
        if self._catalog is None:
            run_in_thread(self.prepare())
        assert self._catalog is not None
        return int(self._catalog.starts[-1])

    def data_digest(self, *, find: bool) -> str | None:
        """Return a digest of the shards' names, sizes and numbers of samples, like `DigestedDataset.data_digest`."""
        if find:
            len(self)
        return None if self._catalog is None else self._digest

    @cached_property
    def _digest(self) -> str:
        # No attribute that a state would change: forked workers are not replaced once the dataset is another.
        assert self._catalog is not None
        shards, infos, starts = self._catalog
        sizes = [shard.size if info is None else info.size for shard, info in zip(shards, infos, strict=True)]
        text = repr((file_names(names_of(shards)), sizes, starts.tolist()))
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()

    async def prepare(self) -> None:
        """Find the shards and index those that have no index, unless that was done. Safe to repeat and to cancel: a
        shard that is indexed is not read again.

        Raises:
            ShardError: an index beside a shard does not fit it; or a shard has another size than its listing says.
            TransportError: the store cannot be read, for a reason that may pass.
            ImportError: a format needs a package that is not installed.
            ValueError: no shard was found, or a URL has no known extension.
        """
        if self._catalog is not None:
            return
        stores, pool = self._stores.template.for_another_loop(), BlockingPool("indexes", THREADS)
        async with aclosing(stores), aclosing(pool):
            shards = await find_shards(self.urls, stores, self.format)
            await in_thread(self._files.prepare)
            indexer = Indexer(
                stores, self._files, pool, max_sample_bytes=self.max_sample_bytes, read_ahead=self.read_ahead
            )
            catalog = await indexer.catalog(shards)
        self._catalog = self._catalog or catalog

    async def __getitem__(self, index: int) -> Sample:
        """Return a sample. Negative numbers count from the end. See `__getitems__`."""
        (sample,) = await self.__getitems__([index])
        return sample

    async def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return samples, in the order of `indices`, which may repeat. Quicker for samples that lie close together.

        Raises:
            IndexError: there is no such sample.
            ShardError, ObjectNotFound: a sample cannot be read.
            TransportError: the store cannot be read, or a shard has changed since it was indexed.
            The errors of `prepare`.
        """
        await self.prepare()
        count = len(self)
        asked = list(map(as_index, indices))
        if not asked:
            return []
        least = min(asked)
        if least < -count or max(asked) >= count:
            wrong = next(each for each in asked if not -count <= each < count)
            raise IndexError(f"sample {wrong} of {count:,} samples: numbers go from 0 to {count - 1:,}")
        numbers = np.array(asked, np.int64)
        if least < 0:
            numbers[numbers < 0] += count
        use = self._stores.enter()
        try:
            reader: ShardsReader = use.reader or self._open_reader(use)
            return await reader.read(numbers)
        finally:
            await self._stores.leave()

    async def __aenter__(self) -> Self:
        self._stores.enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stores.leave()

    def _open_reader(self, use: LoopUse) -> ShardsReader:
        assert self._catalog is not None
        use.reader = reader = ShardsReader(
            self._catalog,
            use.stores,
            self._files,
            self._open_files,
            max_sample_bytes=self.max_sample_bytes,
            read_ahead=self.read_ahead,
            columns=self.columns,
        )
        return reader


async def index_shards(
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    format: str | ShardFormat | None = None,
    transport: Transport | None = None,
    storage_options: Mapping[str, Any] | None = None,
    max_sample_bytes: Size = MAX_SAMPLE_BYTES,
    read_ahead: Size = READ_AHEAD,
) -> int:
    """Write beside each shard the index of its samples, ``_train-000.tar.samples``, which `RemoteMapDataset` reads.

    Several shards are read at a time. A shard that has an index of its present version is left out: a call that was
    killed is repeated. Of MDS and Parquet, which have their own tables, nothing is written.

    Args:
        urls: as of `RemoteIterableDataset`.
        format: as there; no function.
        transport: as there; it must be able to write.
        storage_options: as there.
        read_ahead: as there.
        max_sample_bytes: refuse a sample with more bytes; default ``"1GiB"``.

    Returns:
        How many indexes were written.

    Raises:
        ShardError, ObjectNotFound: a shard cannot be read to its end.
        WriteFailed: the store cannot be written to: a web server, say.
        TransportError: the store cannot be read.
        ValueError: no shard was found, or a URL has no known extension.
    """
    stores, pool = Stores(storage_options, transport=transport), BlockingPool("indexes", THREADS)
    async with aclosing(stores), aclosing(pool):
        shards = await find_shards(urls, stores, format)
        indexer = Indexer(
            stores,
            HostFiles(None, None, OpenFiles()),
            pool,
            max_sample_bytes=size("max_sample_bytes", max_sample_bytes),
            read_ahead=size("read_ahead", read_ahead),
        )
        tableless = [shard for shard in shards if shard.mds is None and shard.format.name != "parquet"]
        return await index_all(tableless, stores, indexer)


def index_shards_sync(urls: Any, **options: Any) -> int:
    """Call `index_shards`, with its options, in a loop of its own, and wait. Works under a running loop, too."""
    return run_in_thread(index_shards(urls, **options))
