"""Measures the CPU time that a worker needs to receive, parse, decode and collate the first samples of a shard.

Data path: transport -> [sample_costs] -> shard_facts -> epoch_simulation.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from itertools import cycle
from time import process_time
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import default_collate

from asyncloader.cpus import use_one_core
from asyncloader.errors import error_line, text_of
from asyncloader.formats import Located, ShardError, open_reader
from asyncloader.remote.assignment import AssignmentLog, ShardAssigner, StreamStart
from asyncloader.remote.catalog import Shard
from asyncloader.remote.reading import CHUNK, SLOW_CHUNK
from asyncloader.remote.shard_splitting import CatalogRange
from asyncloader.remote.stores import Stores
from asyncloader.remote.worker_stream import LocalAssignments, WorkerStream
from asyncloader.simulation.epoch_simulation import WorkerCosts
from asyncloader.transports import Transport
from asyncloader.transports.base import gather_all
from asyncloader.workers.fetch.decoding import Decoder
from asyncloader.workers.fetch.sample import SampleMaker
from asyncloader.workers.fetch.stream_fetcher import WorkerStreamFetcher
from asyncloader.workers.fetch.threads import JobThreads

MEASURED_BYTES = 4 << 20
"""Bytes of a shard that are read, at most, if a sample ends in them."""

MOST_BYTES_READ = 64 << 20
"""Bytes that are read for the first sample, at most."""

MOST_UNPACKED = 256 << 20
"""Bytes that are decompressed, at most."""

_DECODED = 32  # samples
_BATCHES = 4
_BATCHED = 4096  # samples
_LEAST_S = 0.02  # of repetitions
_REQUESTS, _ROUNDS = 8, 3  # as many at a time; and how often
_MOST_TIMES = 20

T = TypeVar("T")


class MeasuredSamples(NamedTuple):
    """The result.

    Attributes:
        costs: of a sample.
        sample_bytes: bytes of the object for a sample.
        samples, nbytes: that were read.
        uncollated: why samples cannot be collated, so that this was not measured; empty: it was.
    """

    costs: WorkerCosts
    sample_bytes: float
    samples: int
    nbytes: int
    uncollated: str


async def measure(
    shard: Shard, stores: Stores, decode: Callable[[Any], Any] | None, batch_size: int
) -> MeasuredSamples | None:
    """Measure the CPU time of a shard's first samples, the fastest of some repetitions; None: it has no samples.

    Args:
        shard: of any format but Parquet.
        stores: find its transport.
        decode: decodes a sample; None: samples are as they are in the shard.
        batch_size: samples that are collated.

    Raises:
        ShardError: the first sample cannot be read, or is too large.
        TransportError: the shard cannot be read.
        ValueError: `decode` is a coroutine function, or it raised.
    """
    if inspect.iscoroutinefunction(decode):
        raise ValueError("decode is a coroutine function, which waits for something: give its seconds, such as 2ms")
    chunks, receiving, whole = await _receive(shard, stores)
    requesting = await _requesting(*stores.find(shard.url)) if chunks else 0.0
    nbytes = sum(map(len, chunks))
    found, parsing = _fastest(lambda: _parse(shard, chunks, whole=whole))
    if not found:
        if whole:
            return None
        raise ShardError(f"no sample ends in the first {nbytes:,} bytes", url=shard.url)
    use_one_core()  # like a worker
    packed = (shard.format.compression if shard.mds is None else shard.mds.compression) is not None
    used = (shard.size or nbytes) if whole else nbytes if packed else found[-1].resume
    samples: list[Any] = [each.sample for each in found[:_DECODED]]
    decoding = 0.0
    with warnings.catch_warnings(action="ignore"):  # of arrays that are not writable, which a worker warns of once
        if decode is not None:
            samples, seconds = _decoded(decode, found[:_DECODED])
            decoding = seconds / len(samples)
        batch_size = min(batch_size, _BATCHED)
        batch = [samples[number % len(samples)] for number in range(batch_size)]
        uncollated = _collate(batch)
        batching = await _batching(shard, found, None if decode is None else samples, batch_size, bool(uncollated))
    costs = WorkerCosts(requesting, receiving, parsing / nbytes, decoding, batching, packed)
    return MeasuredSamples(costs, used / len(found), len(found), nbytes, uncollated)


async def _receive(shard: Shard, stores: Stores) -> tuple[list[bytes], float, bool]:
    """Return the first bytes of a shard; the CPU seconds of a byte, behind the first chunk; and whether these have
    all samples.
    """
    transport, path = stores.find(shard.url)
    reader = open_reader(shard.url, shard.format, shard=shard.mds, max_sample_bytes=MOST_UNPACKED, on_bad=_ignore)
    chunks: list[bytes] = []
    nbytes = samples = timed = 0
    seconds = 0.0
    async with aclosing(transport.stream(path, chunk_size=SLOW_CHUNK)) as stream:
        began = process_time()
        async for chunk in stream:
            now = process_time()
            if chunks:  # the first chunk came with the connection
                seconds, timed = seconds + now - began, timed + len(chunk)
            chunks.append(chunk)
            nbytes += len(chunk)
            found = _feed(reader, chunk)
            samples += len(found)
            over = nbytes >= (MEASURED_BYTES if samples else MOST_BYTES_READ)
            if over or reader.done or _enough(found):
                return chunks, seconds / max(1, timed), reader.done
            began = process_time()
    return chunks, seconds / max(1, timed), True


async def _requesting(transport: Transport, path: str) -> float:
    """Return the CPU seconds of a request over a connection that is open, with an answer of a byte."""
    times: list[float] = []
    for _ in range(_ROUNDS):
        began = process_time()
        await gather_all(transport.read_range(path, 0, 1) for _ in range(_REQUESTS))
        times.append(process_time() - began)
    return min(times[1:]) / _REQUESTS  # the first round opens the connections


def _parse(shard: Shard, chunks: Sequence[bytes], *, whole: bool) -> list[Located]:
    reader = open_reader(shard.url, shard.format, shard=shard.mds, max_sample_bytes=MOST_UNPACKED, on_bad=_ignore)
    size = SLOW_CHUNK if shard.format.name == "jsonl" else CHUNK
    found: list[Located] = []
    data = b"".join(chunks)
    for at in range(0, len(data), size):
        found += _feed(reader, data[at : at + size])
        if reader.done or _enough(found):
            return found
    return found + list(reader.end()) if whole else found


def _ignore(_: ShardError) -> None:
    """Pass over a bad sample, like a reader that skips it."""


def _feed(reader: Any, chunk: bytes) -> list[Located]:
    found = list(reader.feed(chunk))
    while reader.pending and not _enough(found):
        found += reader.feed(b"")
    return found


def _enough(found: Sequence[Located]) -> bool:
    return bool(found) and found[-1].resume >= MOST_UNPACKED


async def _batching(
    shard: Shard, found: Sequence[Located], decoded: Sequence[Any] | None, batch_size: int, uncollated: bool
) -> float:
    """Return the CPU seconds in which a worker makes a sample that was parsed part of a batch.

    Args:
        shard: of the samples.
        found: the samples.
        decoded: those that "decoding" returns, in no time; None: there is no decoding.
        batch_size: samples of a batch.
        uncollated: they cannot be collated.
    """
    batches = max(1, min(_BATCHES, _BATCHED // batch_size))
    rows = [found[number % len(found)] for number in range(batches * batch_size)]

    async def opened(*_: Any) -> AsyncGenerator[Sequence[Located], None]:
        for at in range(0, len(rows), len(found)):
            yield rows[at : at + len(found)]

    results = cycle(decoded or ())
    threads = JobThreads(1, "asyncloader-decode")
    maker = SampleMaker(None, decoder=Decoder(lambda _: next(results), threads) if decoded else None, asynchronous=True)
    times = _Times()
    try:
        while not times.enough:
            assigner = ShardAssigner(AssignmentLog([(CatalogRange(0, 0, None),)]), [StreamStart()])
            async with aclosing(WorkerStream([shard], opened, LocalAssignments(assigner, 0), 0)) as stream:
                fetcher = WorkerStreamFetcher(stream, maker, True, list if uncollated else default_collate, False, 0)
                began = process_time()
                for _ in range(batches):
                    await fetcher.fetch_async(range(batch_size))
                times.append(process_time() - began)
    finally:
        threads.close()
    return min(times) / len(rows)


def _decoded(decode: Callable[[Any], Any], found: Sequence[Located]) -> tuple[list[Any], float]:
    """Return samples as the user's function makes them, and its CPU seconds for all."""
    try:
        return _fastest(lambda: [decode(dict(each.sample)) for each in found])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # it may even end Python
        raise ValueError(f"decode raised {error_line(error)}") from error


def _collate(batch: Sequence[Any]) -> str:
    try:
        default_collate(list(batch))
    except Exception as error:  # samples of different sizes, or of types that need a function of the user's
        return text_of(error).splitlines()[0]
    return ""


class _Times(list[float]):
    """The CPU seconds of some calls, of which the fastest counts: others were interrupted."""

    @property
    def enough(self) -> bool:
        """Whether more calls would find nothing new."""
        return len(self) >= _MOST_TIMES or (len(self) > 1 and sum(self) >= _LEAST_S)


def _fastest(function: Callable[[], T]) -> tuple[T, float]:
    """Return the result, and the CPU seconds of the fastest of some calls."""
    times = _Times()
    while True:
        began = process_time()
        found = function()
        times.append(process_time() - began)
        if times.enough:
            return found, min(times)
