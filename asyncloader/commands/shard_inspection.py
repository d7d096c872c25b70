"""`asyncloader inspect`: reads shards from end to end, counts their samples, and finds damage.

Data path: remote.discovery -> [shard_inspection: remote.reading for each shard] -> findings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from typing import NamedTuple

import numpy as np

from asyncloader.errors import is_about_sample
from asyncloader.formats import CompressedReader, Located, OnBad, ShardError, ShardRange, ShardReader, TarReader
from asyncloader.formats.compressed import MemberDecoder
from asyncloader.formats.tar import split_name
from asyncloader.remote.catalog import Shard
from asyncloader.remote.discovery import expand_urls, find_shards, split_url
from asyncloader.remote.index_counts import read_records
from asyncloader.remote.reading import read_shard_range
from asyncloader.remote.shard_index import ShardRecord
from asyncloader.remote.shard_sizes import with_counts, with_sizes
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.transports import ObjectNotFound
from asyncloader.transports.base import gather_all
from asyncloader.verification.findings import Finding, in_bytes

_AT_ONCE = 8  # shards
_SHOWN = 20  # damaged shards, and errors of each
_LINKS = {b"1": ("a hard", "--hard-dereference"), b"2": ("a symbolic", "--dereference")}


class _Read(NamedTuple):
    """What reading a shard gave: the number of its samples, and its errors."""

    samples: int
    errors: Sequence[str]
    more_errors: int = 0


async def inspect(urls: Sequence[str], format: str | None, *, read: bool) -> list[Finding]:
    """Describe the shards.

    Args:
        urls: as `RemoteIterableDataset` takes them.
        format: of all shards; None: by the extension.
        read: read each shard from end to end. Otherwise only listings, sizes and indexes are read.

    Raises:
        ValueError, ShardError, TransportError: the shards cannot be found; see `find_shards`.
        ImportError: a package that reads them is not installed.
    """
    async with aclosing(Stores()) as stores:
        shards = await find_shards(urls, stores, format)
        leave = (ObjectNotFound, ShardError)
        shards = await with_counts(await with_sizes(shards, stores, leave=leave), stores, leave=leave)
        records, others = await read_records(shards, stores, listed=True)
        found: dict[int, _Read] = {}
        if read:
            waiting = iter(enumerate(shards))

            async def work() -> None:
                for number, shard in waiting:
                    found[number] = await _read(shard, stores, records.get(number))

            await gather_all(work() for _ in range(min(_AT_ONCE, len(shards))))
    shards = [
        shard._replace(samples=records[number].samples) if number in records else shard
        for number, shard in enumerate(shards)
    ]
    return [_summary(shards), *_counts(shards, found), *_missing(urls, others), *_damage(shards, found)]


async def _read(shard: Shard, stores: Stores, record: ShardRecord | None) -> _Read:
    samples, more = 0, 0
    errors: list[str] = []

    def note(error: Exception) -> None:
        nonlocal more
        if len(errors) < _SHOWN:
            errors.append(str(error))
        else:
            more += 1

    def look_closely(url: str, _: ShardRange) -> ShardReader:
        inspector, compression = _TarInspector(url, note), shard.format.compression
        return inspector if compression is None else CompressedReader(url, inspector, MemberDecoder(compression))

    reader = look_closely if shard.format.name == "tar" else None
    try:
        async with aclosing(read_shard_range(stores, shard, CatalogRange(0), on_bad=note, reader=reader)) as batches:
            async for batch in batches:
                samples += len(batch)
                await asyncio.sleep(0)
    except Exception as error:
        if not is_about_sample(error):  # such as a missing package
            raise
        note(error)
    expected, stated, size = shard.samples, None, shard.size
    if record is not None:
        expected, stated = record.samples, record.bytes
    elif not errors and shard.mds is not None:  # whose size is the index's
        stated = size
        size = (await with_sizes([shard._replace(size=None)], stores))[0].size
    if not errors and expected not in (None, samples):
        note(ShardError(f"it has {samples} samples, but its index says {expected}"))
    if not errors and stated is not None and size not in (None, stated):
        note(ShardError(f"it has {size:,} bytes, but its index says {stated:,}"))
    return _Read(samples, errors, more)


def _summary(shards: Sequence[Shard]) -> Finding:
    formats = sorted({shard.format.name for shard in shards})
    sizes = [shard.size for shard in shards if shard.size is not None]
    text, unknown = f"{len(shards):,} of format {', '.join(formats)}", len(shards) - len(sizes)
    if sizes:
        text += f", {in_bytes(sum(sizes))}; a shard has {_spread(sizes, in_bytes)}"
    return Finding(
        "shards",
        "ok",
        text + (f"; the sizes of {unknown} are unknown" if unknown else ""),
        figures={"shards": len(shards), "bytes": sum(sizes), "formats": formats},
    )


def _counts(shards: Sequence[Shard], found: dict[int, _Read]) -> Iterator[Finding]:
    if found:
        counts = [found[number].samples for number in range(len(shards))]
    else:
        counts = [shard.samples for shard in shards if shard.samples is not None]
    if not counts:
        yield Finding("samples", "note", "unknown", "these shards have no index: leave out --no-read to count")
        return
    some = "" if len(counts) == len(shards) else f" in the {len(counts)} shards that have an index"
    text = f"{sum(counts):,}{some}; a shard has {_spread(counts, '{:,.0f}'.format)}"
    if (size := sum(shard.size or 0 for shard in shards)) and sum(counts) and len(counts) == len(shards):
        text += f"; a sample takes {in_bytes(size / sum(counts))} on average"
    yield Finding("samples", "ok", text, figures={"samples": sum(counts), "counted_shards": len(counts)})
    if empty := sum(not each.samples and not each.errors for each in found.values()):
        yield Finding("empty shards", "note", f"{empty}", figures={"empty": empty})


def _spread(values: Sequence[int], text: Callable[[float], str]) -> str:
    least, middle, most = (text(each) for each in np.percentile(values, [0, 50, 100]).tolist())
    return f"{least}" if least == most else f"{least} to {most}, half of them at most {middle}"


def _missing(urls: Sequence[str], listed: Sequence[str]) -> Iterator[Finding]:
    """Name the shards of given folders that an index lists, and that are not there."""
    folders = tuple(split_url(url)[0].removesuffix("/") + "/" for url in expand_urls(urls))
    missing = [url for url in listed if url.startswith(folders)]
    if missing:
        names = ", ".join(missing[:_SHOWN]) + (f", and {len(missing) - _SHOWN:,} more" if len(missing) > _SHOWN else "")
        yield Finding(
            "missing shards",
            "problem",
            f"the index lists {len(missing):,} that are not in their folder: {names}",
            "write them again, or the index if they were removed on purpose",
            figures={"missing": len(missing), "urls": missing[:_SHOWN]},
        )


def _damage(shards: Sequence[Shard], found: dict[int, _Read]) -> Iterator[Finding]:
    damaged = [(shards[number].url, each) for number, each in sorted(found.items()) if each.errors]
    for url, each in damaged[:_SHOWN]:
        text = "; ".join(each.errors) + (f"; and {each.more_errors} more" if each.more_errors else "")
        count = len(each.errors) + each.more_errors
        yield Finding(
            "damage", "problem", f"{url}: {text}", figures={"url": url, "errors": count, "samples": each.samples}
        )
    if damaged:
        yield Finding(
            "damaged shards",
            "problem",
            f"{len(damaged)} of {len(shards)}",
            "write them again, or read on with on_error='skip'",
            figures={"damaged": len(damaged)},
        )
    elif found:
        yield Finding("damage", "ok", "none: every shard was read from end to end")


class _TarInspector(TarReader):
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
