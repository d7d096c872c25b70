"""`Mixture`: datasets and streams of shards, mixed in given proportions, as one dataset for a loader with ``seed=``.

Data path: samplers.mixture -> scheduler -> worker: [mixture] -> fixed_streams, datasets -> collate.

The main process plans the streams, and computes the order (`samplers.mixture`). The copy in each worker gets
the samples from the sources. A stream that begins another pass is read by another copy of its `FixedStreams`, since
batches of both passes may be in work.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Sized
from fractions import Fraction
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from asyncloader.base.bridge import in_thread
from asyncloader.base.shielding import wait_until_done
from asyncloader.errors import StateError
from asyncloader.ranks.exchange import together
from asyncloader.remote.fixed_streams import FixedStreams
from asyncloader.remote.stream_order import LANES
from asyncloader.samplers.mixture import MixedPositions, Place
from asyncloader.samplers.mixture_order import MixtureOrder, OnExhausted, check_mixture, whole_weights
from asyncloader.samplers.positions import LoaderDataset, PlacedSamples
from asyncloader.workers.fetch.context import context_managers
from asyncloader.workers.fetch.dataset_kinds import digest_of, is_async_dataset
from asyncloader.workers.fetch.seeding import derive
from asyncloader.workers.fetch.threads import JobThreads

if TYPE_CHECKING:
    from asyncloader.ranks.exchange import RankExchange

_PASSES = 2  # over a stream that are open at the same time

Weights = Sequence[float | Fraction]


class Mixture(LoaderDataset, Dataset[Any]):
    """Map datasets and streams of shards, mixed in exact proportions, for a loader with ``seed=``.

    The samples are interleaved evenly, and not drawn: after any number of samples, each source is within 1.68 samples
    of its exact share; with three sources within 1, with two within 1/2 (`samplers/mixture_order.py` has the
    proof). Map datasets are shuffled anew for each pass over them, streams as their `shuffle_buffer` says. The order is
    a function of the arguments, the loader's seed and global batch, and the epoch, on any workers and ranks.

    Args:
        sources: map datasets, also async ones, and `RemoteIterableDataset`s with `streams=`, of which the loader
            counts the samples before the first epoch. A blocking dataset is called in a thread, one sample at a time.
        weights: of each source, in any unit; 0 leaves a source out. They may change by epoch: a mapping from epochs to
            weights, each of which holds until the next, with weights for epoch 0. `loader.feedback(weights)` sets them
            for the epochs that have not begun.
        lengths: of each source, the mean number of tokens of its samples: weights are then shares of tokens, exact over
            whole passes with ``Fraction(tokens, samples)``. None: shares of samples.
        num_samples: samples of an epoch; for ``on_exhausted="repeat"`` only. Default: all samples of the sources that
            have a weight.
        on_exhausted: the rule for a source that is used up:
            ``"repeat"`` (default) begins another pass over it: a map dataset is shuffled again, and a stream goes on
            with its next epoch. An epoch continues at the end of the epoch before, in its passes and its proportions.
            ``"stop"`` ends the epoch. The other sources continue their pass in the next epoch.
            ``"drop"`` continues with the other sources, in their proportions, until all are used up.
        shuffle: False takes each map dataset in its order. Default True. A loader's ``shuffle=True`` shuffles
            all sources, also streams without a `shuffle_buffer`.

    Raises:
        TypeError: a source is neither, or is a stream without `streams=`; or lengths or `num_samples` are no integers.
        ValueError: the numbers of weights or lengths and sources differ, or an argument is out of range.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        weights: Weights | Mapping[int, Weights],
        *,
        lengths: Sequence[float | Fraction] | None = None,
        num_samples: int | None = None,
        on_exhausted: OnExhausted = "repeat",
        shuffle: bool = True,
    ) -> None:
        self.num_samples = check_mixture(on_exhausted, num_samples)
        self.sources = list(sources)
        for number, source in enumerate(self.sources):
            _check_source(number, source)
        if lengths is not None and len(lengths) != len(self.sources):
            raise ValueError(f"there should be lengths for each source, but got {len(lengths)} for {len(self.sources)}")
        self._means = None if lengths is None else [_mean(number, each) for number, each in enumerate(lengths)]
        by_epoch = weights if isinstance(weights, Mapping) else {0: weights}
        if 0 not in by_epoch or not all(isinstance(epoch, int) and epoch >= 0 for epoch in by_epoch):
            raise ValueError(f"weights by epoch should begin with epoch 0, but got epochs {list(by_epoch)}")
        self.weights = [(epoch, self.whole(by_epoch[epoch])) for epoch in sorted(by_epoch)]
        """Shares of samples, as whole numbers, with the epoch from which they hold."""
        self.on_exhausted: OnExhausted = on_exhausted
        self.shuffle = bool(shuffle)

    def __repr__(self) -> str:
        return f"<Mixture of {len(self.sources)}, on_exhausted={self.on_exhausted!r}>"

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("a Mixture is read by a loader with seed=, in its own order: give a seed, and no sampler")

    def __len__(self) -> int:
        raise TypeError("a Mixture has a length in a loader with seed=: give a seed, and no sampler")

    def whole(self, weights: Weights) -> list[int]:
        """Return checked weights as whole shares of samples. ValueError: they are out of range."""
        if len(weights) != len(self.sources):
            raise ValueError(f"there should be one weight a source, but got {len(weights)} for {len(self.sources)}")
        if self._means is None:
            return whole_weights(weights)
        exact = whole_weights(weights)
        return whole_weights([weight / mean for weight, mean in zip(exact, self._means, strict=True)])

    def shuffled(self) -> Self:
        """Return a copy that shuffles the samples of each source. A loader's ``shuffle=True``."""
        other = copy.copy(self)
        other.sources = [each.shuffled() if _is_stream(each) else each for each in self.sources]
        other.shuffle = True
        return other

    def fixed_streams(self, seed: int) -> MixedSources:
        """Return the mixture as a loader with this seed reads it."""
        return (MixedStreams if all(map(_is_stream, self.sources)) else MixedSources)(self, seed)

    def for_loader(self, arguments: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Return the arguments with the samples at their places, and their order; without a seed as they are."""
        if seed is None:
            return arguments
        mixed = (self.shuffled() if arguments["shuffle"] else self).fixed_streams(seed)
        return arguments | {"dataset": mixed, "sampler": mixed.positions(), "shuffle": None}


class MixedSources(PlacedSamples, Dataset[Any]):
    """The samples of a `Mixture` at their places. Made by a loader with ``seed=``.

    Args:
        source: the mixture.
        seed: the loader's.
    """

    lanes = LANES
    """Global batches in a row that are read from different streams, about."""

    elastic = None
    """A state is of one order only."""

    def __init__(self, source: Mixture, seed: int) -> None:
        self.source = source
        self.seed = seed
        self.streams = [_is_stream(each) for each in source.sources]
        self._parts: list[Any] = [
            each.fixed_streams(derive(seed, "mixture", number)) if _is_stream(each) else each
            for number, each in enumerate(source.sources)
        ]
        self._sizes: list[list[int]] = []  # shared with the copies of the iterators; one list, or none yet
        self._forget()

    def _forget(self) -> None:
        self._open: dict[int, OrderedDict[int, _StreamPass]] = {}  # by stream and pass, the newest last
        self._stack = contextlib.AsyncExitStack()
        self._closing: set[asyncio.Task[None]] = set()
        self._thread: JobThreads | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("source", "seed", "streams", "_parts", "_sizes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __repr__(self) -> str:
        return f"<MixedSources of {self.source!r}>"

    # ----------------------------------------------------------------------------- in the main process

    def for_iterator(self) -> Self:
        """Return a copy with readers of its own."""
        made = type(self).__new__(type(self))
        made.__setstate__(self.__getstate__())
        return made

    def positions(self) -> MixedPositions:
        """Return a sampler of the order."""
        return MixedPositions(self, self.source.weights, self.source.whole, self.order, self.streams)

    async def plan_streams(self, batch: int, ranks: RankExchange | None = None) -> None:
        """Count the samples of the streams, unless that was done. As `FixedStreams.plan_streams`."""
        if ranks is not None:  # ranks with other sources would wait for each other
            await ranks.compare({"sources that are streams": self.streams})
        for number, part in enumerate(self._parts):
            if self.streams[number]:
                await part.plan_streams(self._part_of(batch, number), ranks)
        self._sizes[:] = [await together(self._measure_all(), ranks)]
        if ranks is not None:
            await ranks.compare({"samples of the sources": self.sizes})

    async def _measure_all(self) -> list[int]:
        return [await self._measure(number) for number in range(len(self._parts))]

    def _part_of(self, batch: int, number: int) -> int:
        """Return about the samples of a global batch that are a stream's, which are then read from few streams."""
        return max(1, round(batch * max(Fraction(weights[number], sum(weights)) for _, weights in self.source.weights)))

    async def _measure(self, number: int) -> int:
        """Return the number of samples of a source."""
        part = self._parts[number]
        if not self.streams[number]:
            return await in_thread(partial(len, part))  # the user's code
        return int(part.samples)

    @property
    def samples(self) -> int | None:
        """Number of samples of all sources; None before `plan_streams`."""
        return sum(self._sizes[0]) if self._sizes else None

    @property
    def sizes(self) -> list[int]:
        """Samples of each source, once planned."""
        return self._sizes[0]

    def order(self, weights: Sequence[tuple[int, Sequence[int]]]) -> MixtureOrder:
        """Return the mixture with these weights. ValueError: a source that has a weight is empty."""
        source = self.source
        seed = self.seed if source.shuffle else None
        return MixtureOrder(self.sizes, weights, source.on_exhausted, source.num_samples, seed)

    def left(self, before: Sequence[Any], epoch: int) -> int:
        """Raise StateError: as `elastic` says."""
        raise StateError(f"a mixture cannot go on with epoch {epoch} of {len(before)} other orders")

    def described(self) -> dict[str, Any]:
        """Return the values that must be the same where a state is loaded; sources are None before `plan_streams`."""
        sources: list[Any] | None = None
        if self._sizes:
            parts = zip(self._parts, self.streams, self.sizes, strict=True)
            sources = [part.described() if stream else _described(part, size) for part, stream, size in parts]
        return {
            "sources": sources,
            "weights": [[epoch, [*weights]] for epoch, weights in self.source.weights],
            "on_exhausted": self.source.on_exhausted,
            "num_samples": self.source.num_samples,
            "shuffle": self.source.shuffle,
        }

    # ---------------------------------------------------------------------------------- in a worker

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:  # exits those that were entered, if another cannot be
            for part, stream in zip(self._parts, self.streams, strict=True):
                if not stream:
                    for manager in context_managers(part):
                        await stack.enter_async_context(manager)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for readings in self._open.values():
            for reading in readings.values():
                self._stack.push_async_exit(reading.streams)
        self._open = {}
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.close()
            # Not in this thread: the user's code may still be in a call that was cancelled.
            self._stack.push_async_callback(in_thread, thread.join)
        await wait_until_done(list(self._closing))
        await self._stack.aclose()

    async def __getitem__(self, place: Place) -> Any:
        """Return the sample at a place. Errors as of its source."""
        source, passes, index = place
        part = self._parts[source]
        if self.streams[source]:
            reading = self._reading(source, passes)
            try:
                return await reading.streams[index]
            finally:
                self._release(source, reading)
        if is_async_dataset(part):
            return await part[index]
        if self._thread is None:
            self._thread = JobThreads(1, "asyncloader-mixture")
        sample = await self._thread.call(part.__getitem__, index)
        return await sample if inspect.isawaitable(sample) else sample

    def _reading(self, source: int, passes: int) -> _StreamPass:
        """Return the reader of a pass over a stream. The caller must `_release` it."""
        readings = self._open.setdefault(source, OrderedDict())
        reading = readings.get(passes)
        if reading is None:
            streams = self._parts[source].for_iterator()
            streams.set_epoch(passes)
            streams.enter()
            reading = readings[passes] = _StreamPass(streams)
        readings.move_to_end(passes)
        reading.users += 1
        return reading

    def _release(self, source: int, reading: _StreamPass) -> None:
        reading.users -= 1
        readings = self._open.get(source, OrderedDict())
        while len(readings) > _PASSES and (idle := next((at for at, each in readings.items() if not each.users), None)):
            closing = asyncio.create_task(readings.pop(idle).streams.__aexit__(None, None, None))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


class MixedStreams(MixedSources):
    """A mixture of streams only, of which a batch is read at once."""

    async def __getitems__(self, places: Sequence[Place]) -> list[Any]:
        """Return the samples at these places. Errors as `FixedStreams.__getitems__`."""
        wanted: dict[tuple[int, int], list[int]] = {}
        for at, (source, passes, _) in enumerate(places):
            wanted.setdefault((source, passes), []).append(at)
        samples: list[Any] = [None] * len(places)
        readings = [(source, self._reading(source, passes), ats) for (source, passes), ats in wanted.items()]
        try:
            async with asyncio.TaskGroup() as group:
                for _, reading, ats in readings:
                    group.create_task(_read(reading.streams, [places[at][2] for at in ats], ats, samples))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for source, reading, _ in readings:
                self._release(source, reading)
        return samples


class _StreamPass:
    """A pass over a stream, and the number of tasks that read it."""

    def __init__(self, streams: FixedStreams) -> None:
        self.streams = streams
        self.users = 0


async def _read(streams: FixedStreams, positions: list[int], ats: list[int], samples: list[Any]) -> None:
    for at, sample in zip(ats, await streams.__getitems__(positions), strict=True):
        samples[at] = sample


def _is_stream(source: Any) -> bool:
    return callable(getattr(source, "fixed_streams", None))


def _check_source(number: int, source: Any) -> None:
    if isinstance(source, Mixture):
        raise TypeError(f"source {number} is a Mixture; give its sources, with the products of the weights")
    if _is_stream(source):
        if source.streams is None:
            raise TypeError(
                f"source {number} is a RemoteIterableDataset without streams=, whose samples have no order of their "
                "own; give it streams=8, for example"
            )
    elif isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and isinstance(source, Sized)):
        raise TypeError(
            f"source {number} should be a map dataset with a length, or a RemoteIterableDataset with streams=, but is "
            f"{type(source).__name__}: the samples of other streams are not counted, so that nothing says when one ends"
        )


def _mean(number: int, length: Any) -> Fraction:
    """Return the mean length of a source's samples."""
    given = np.asarray(length)
    if isinstance(length, Fraction):
        mean = length
    elif given.ndim or given.dtype.kind not in "iuf" or not np.isfinite(given):
        raise TypeError(
            f"the length of source {number} should be a number, but got {length!r:.80}; of the lengths of all samples "
            "give the mean: Fraction(int(lengths.sum()), len(lengths))"
        )
    else:
        mean = Fraction(given.item())
    if mean <= 0:
        raise ValueError(f"the length of source {number} should be positive, but got {length!r}")
    return mean


def _described(part: Any, samples: int) -> dict[str, Any]:
    """Return the values of a map dataset that must be the same where a state is loaded."""
    digest = digest_of(part)
    return {"samples": samples} if digest is None else {"samples": samples, "shards": digest}
