"""Reads async samplers ahead, and turns their items into steps.

Data path: [async_sampler] -> scheduler.

A plain sampler advances as in torch: in the caller's thread, once per delivery. An async sampler may wait (for a queue,
a server, feedback), so a task of the loop reads it ahead, as far as credits allow. A `PositionSource` gives a rank's
steps of a dataset's own order, which are known once the main process has counted the samples; they are read likewise.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from torch.utils.data import BatchSampler, Sampler

from asyncloader.base.events import PositionedIndex
from asyncloader.base.topology import Topology
from asyncloader.samplers.distributed import Cutter, RankView, Share
from asyncloader.samplers.index_stream import StateLog
from asyncloader.samplers.positions import COUNTED, Positions, RestOfPositions
from asyncloader.workers.fetch.dataset_kinds import check_plain
from asyncloader.workers.fetch.dataset_state import is_stateful

if TYPE_CHECKING:
    from asyncloader.ranks.exchange import RankExchange


@runtime_checkable
class AsyncSampler(Protocol):
    """An async iterable of indices (as `sampler`) or of lists of indices (as `batch_sampler`).

    Each ``aiter()`` begins an epoch. A `__len__` is optional; without it ``len(loader)`` is a TypeError.
    """

    def __aiter__(self) -> AsyncIterator[Any]: ...


def is_async_sampler(sampler: object) -> TypeGuard[AsyncIterable[Any]]:
    """Return whether the sampler can only be read with ``async for``."""
    # torch's base class of samplers has an `__iter__` that only raises.
    plain = getattr(type(sampler), "__iter__", None) not in (None, Sampler.__iter__)
    return hasattr(type(sampler), "__aiter__") and not plain


_END = object()


class ReadingPosition(Protocol):
    """The part of `state.progress.Progress` that a reader of an async sampler uses."""

    epoch: int
    log: StateLog | None
    every: int
    drained: dict[str, Any] | None
    view: RankView | None
    total: int | None

    @property
    def first_step(self) -> int:
        """The step from which the epoch continues."""
        ...

    @property
    def skipped(self) -> frozenset[int]:
        """Later steps that were delivered before."""
        ...

    @property
    def saved_sampler(self) -> dict[str, Any] | None:
        """The sampler's state from which the epoch resumes."""
        ...

    def pulled(self, task: int, step: int) -> None:
        """Note the step of a task."""
        ...


class AsyncIndexSource:
    """The scheduler's source of steps if the sampler is async: single indices, the user's batches, or gathered batches.

    Args:
        sampler: an async iterable.
        batch_size: gather this many indices into a list; None to pass on each item.
        drop_last: leave out a last short batch.
    """

    def __init__(self, sampler: AsyncIterable[Any], batch_size: int | None, drop_last: bool) -> None:
        self.sampler = sampler
        self.seeded = False
        """Whether indices are returned with their positions."""
        self.share = Share(batch_size, drop_last, Topology(0, 1), "drop")
        """This rank's share of the sampler's items."""

    def __iter__(self) -> Iterator[Any]:
        """Return an empty iterator: torch's iterator base calls `iter`, which an async sampler does not support."""
        return iter(())

    def __len__(self) -> int:
        return len(RankView(self.sampler, self.share))

    def first_log(self, every: int, /) -> StateLog | None:
        """Return the state log of a sampler that begins an epoch; None if the sampler has no state."""
        log = StateLog(every, None)
        return log if is_stateful(self.sampler) and log.note(0, self.sampler) else None

    async def read(self, position: ReadingPosition) -> AsyncIterator[Any]:
        """Yield the indices from a position on, one per step; steps that were delivered out of order are skipped."""
        sampler = self.sampler
        items, first = await self._find(position)
        step = 0 if position.saved_sampler is None else position.saved_sampler["at"]
        view = position.view = RankView(sampler, self.share)
        cutter = view.cutter = Cutter(self.share)
        group, task = list[Any](), 0
        try:
            while (item := first if first is not _END else await anext(items, _END)) is not _END:
                first = _END
                group.append(item)
                # A step takes the items of all ranks, of which `cut` returns this rank's part.
                if len(group) < cutter.stride:
                    continue
                item, group = cutter.cut(step, group), []
                step += 1
                # Before the step is returned: a loader's state may be saved as soon as its batch is delivered.
                if position.log is not None and not position.log.note(step, sampler, items):
                    position.log = None
                if item is None or step <= position.first_step or step - 1 in position.skipped:
                    continue
                position.pulled(task, step - 1)
                task += 1
                yield item if self.seeded else item.index
            item = cutter.cut(step, group)
            if item is not None and step >= position.first_step and step not in position.skipped:
                position.pulled(task, step)
                yield item if self.seeded else item.index
        finally:
            # Closed together with this generator, and not later by the loop's hook for abandoned generators.
            if isinstance(items, AsyncGenerator):
                await items.aclose()

    async def _find(self, position: ReadingPosition) -> tuple[Any, Any]:
        """Return the sampler's iterator at or before the position, and an item that was taken from it (or `_END`)."""
        sampler: Any = self.sampler
        if position.drained is not None:  # advance to the end of the saved state's epoch
            async for _ in _iterate(sampler, position.drained):
                pass
            position.log = self.first_log(position.every)
        saved = position.saved_sampler
        items = _iterate(sampler, saved)
        first: Any = _END
        if saved is not None and not saved["at"]:
            # The sampler may have been at the end of its last epoch: then its iterator ends at once.
            first = await anext(items, _END)
            if first is _END:
                items = aiter(sampler)
        if saved is not None or (position.log is None and is_stateful(items)):
            position.log = StateLog(position.every, saved) if is_stateful(sampler) or is_stateful(items) else None
            if position.log is not None and saved is None and not position.log.note(0, sampler, items):
                position.log = None
        return items, first


def _iterate(sampler: Any, saved: dict[str, Any] | None) -> Any:
    """Return the sampler's iterator at a saved state."""
    if saved is not None and saved["sampler"] is not None:
        sampler.load_state_dict(copy.deepcopy(saved["sampler"]))
    items: Any = aiter(sampler)
    if saved is not None and saved["iterator"] is not None:
        items.load_state_dict(copy.deepcopy(saved["iterator"]))
    return items


def as_async_source(index_sampler: Any) -> AsyncIndexSource | None:
    """Return the async source for a loader's index sampler; None for a plain sampler."""
    if type(index_sampler) is BatchSampler and is_async_sampler(index_sampler.sampler):
        sampler, size, drop_last = index_sampler.sampler, index_sampler.batch_size, index_sampler.drop_last
    elif is_async_sampler(index_sampler):
        sampler, size, drop_last = index_sampler, None, False
    else:
        return None
    if isinstance(sampler, Positions):
        return PositionSource(sampler, size, drop_last)
    return AsyncIndexSource(sampler, size, drop_last)


def feedback_target(spec: Any) -> Callable[..., Any]:
    """Return the `feedback` method of a loader's sampler or batch sampler.

    Raises:
        TypeError: neither has the method, or it is a coroutine function.
    """
    samplers = [getattr(spec, "batch_sampler", None), getattr(spec, "sampler", None)]
    for sampler in samplers:
        method = getattr(sampler, "feedback", None)
        if callable(method):
            check_plain(f"{type(sampler).__name__}.feedback", method)
            return method  # type: ignore[no-any-return]
    own = (sampler for sampler in samplers if sampler is not None and type(sampler) is not BatchSampler)
    kind = next((type(sampler).__name__ for sampler in own), "the loader's sampler")
    raise TypeError(f"feedback goes to the sampler's method 'feedback', but {kind} has none; give the sampler one")


class PositionSource(AsyncIndexSource):
    """The scheduler's source of steps for `Positions`."""

    sampler: Positions
    ranks: RankExchange | None = None
    """The other ranks, which plan together with this one; None: this rank plans alone."""

    @property
    def lane_of(self) -> Callable[[PositionedIndex, int], int]:
        """A function that says which lane a step belongs to, given the number of workers: more workers than lanes make
        each in turn.
        """
        batch, lanes = self.batch, self.sampler.dataset.lanes
        return lambda index, workers: index.first // batch % (lanes * max(1, workers // lanes))

    @property
    def batch(self) -> int:
        """Samples in a global batch."""
        return (self.share.batch_size or 1) * self.share.topology.world_size

    def most_steps(self, samples: int) -> int:
        """Return the number of steps of so many samples on any number of ranks: a short last step may be no step of
        these.
        """
        return -(-samples // self.batch)

    def first_log(self, _: int, /) -> StateLog | None:
        """Return None: the state is noted by `read`, once the shards are known."""
        return None

    async def plan(self, position: ReadingPosition | None = None) -> None:
        """Count the samples, unless that was done.

        Args:
            position: of the iterator that begins, where all ranks plan together; None: this rank plans alone.

        Raises:
            RanksDisagree: another rank would read other samples, or as many in other batches; or it could not count.
            The errors of `PlannedDataset.plan_streams`.
        """
        dataset, ranks = self.sampler.dataset, self.ranks
        if position is not None and ranks is not None and not ranks.done:
            async with ranks.planning():
                if not ranks.done:
                    await ranks.compare(self._order(position))
                    await dataset.plan_streams(self.batch, ranks)
                    ranks.done = True
        await dataset.plan_streams(self.batch)

    def _order(self, position: ReadingPosition) -> dict[str, Any]:
        """Return the values, besides the samples, from which all ranks' batches follow.

        Not the position: the ranks of a `PackedLoader` resume at windows, and even epochs, of their own.
        """
        dataset = self.sampler.dataset
        saved = position.saved_sampler and position.saved_sampler["sampler"]
        described: dict[str, Any] = {"before": [], **self.sampler.state_dict()}
        if isinstance(saved, dict):
            state = self.sampler.resumed(saved)
            described |= {name: state[name] for name in ("feedback", "before") if name in state}
        return {
            "kind of dataset": type(dataset).__name__,
            "seed": dataset.seed,
            "global batch": self.batch,
            **{name: value for name, value in described.items() if name not in COUNTED},
            "drop_last": self.share.drop_last,
            "on_uneven": self.share.on_uneven,
        }

    async def read(self, position: ReadingPosition) -> AsyncIterator[Any]:
        """Yield the indices from a position on. See `AsyncIndexSource.read`."""
        saved, ended = position.saved_sampler, position.drained
        await self.plan(position)
        order = self.sampler
        if saved is not None:
            order.load_state_dict(saved["sampler"])
            if before := saved["sampler"].get("before"):
                order = RestOfPositions(order, before)
        elif ended is not None:
            order.follow(ended["sampler"])
        view = position.view = RankView(order.sampler(position.epoch), self.share)
        position.total = len(view)
        first, task = position.first_step, 0
        # Known only now: steps were left out before the samples were counted, or the state is broken.
        last = max([first, *(step + 1 for step in position.skipped)])
        if last > max(position.total, self.most_steps(len(view.sampler))):
            raise IndexError(f"epoch {position.epoch} has no step {last - 1}: it has {position.total} batches")
        position.log = _PresentState(order)
        for step, item in enumerate(view.iter_from(first), first):
            if step not in position.skipped:
                position.pulled(task, step)
                task += 1
                yield item


class _PresentState(StateLog):
    """The state of a sampler at all steps: it has no position, and changes by `feedback` alone."""

    def __init__(self, sampler: Positions) -> None:
        super().__init__(0, None)
        self._sampler = sampler

    def at(self, step: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the state as it is now."""
        return {"at": 0, "ended": False, "sampler": self._sampler.state_dict(), "iterator": None}
