"""Reads async samplers ahead, and turns their items into steps.

Data path: [async_sampler] -> scheduler.

A plain sampler advances as in torch: in the caller's thread, once per delivery. An async sampler may wait (for a queue,
a server, feedback), so a task of the loop reads it ahead, as far as credits allow.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator
from typing import Any, Protocol, TypeGuard, runtime_checkable

from torch.utils.data import BatchSampler, Sampler

from asyncloader.ranks.topology import Topology
from asyncloader.samplers.distributed import Cutter, RankView, Share
from asyncloader.samplers.index_stream import StateLog
from asyncloader.samplers.positions import Positions
from asyncloader.workers.fetch.dataset_state import is_stateful
from asyncloader.workers.fetch.plain_calls import check_plain


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
        cutter = view.cutter = Cutter(self.share, step)
        group, task = list[Any](), 0
        try:
            while (item := first if first is not _END else await anext(items, _END)) is not _END:
                first = _END
                group.append(item)
                # A step takes the items of all ranks, of which `cut` returns this rank's part.
                if len(group) < cutter.stride:
                    continue
                item, group = cutter.cut(group), []
                step += 1
                # Before the step is returned: a loader's state may be saved as soon as its batch is delivered.
                if position.log is not None and not position.log.note(step, sampler, items):
                    position.log = None
                if item is None or step <= position.first_step or step - 1 in position.skipped:
                    continue
                position.pulled(task, step - 1)
                task += 1
                yield item if self.seeded else item.index
            item = cutter.cut(group)
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
        if position.drained is not None:
            await _drain(sampler, position.drained)
            position.log = self.first_log(position.every)
        saved = position.saved_sampler
        if saved is not None and saved["sampler"] is not None:
            sampler.load_state_dict(copy.deepcopy(saved["sampler"]))
        items: Any = aiter(sampler)
        if saved is not None and saved["iterator"] is not None:
            items.load_state_dict(copy.deepcopy(saved["iterator"]))
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


async def _drain(sampler: Any, saved: dict[str, Any]) -> None:
    """Advance a sampler to the end of its saved state's epoch."""
    if saved["sampler"] is not None:
        sampler.load_state_dict(copy.deepcopy(saved["sampler"]))
    items: Any = aiter(sampler)
    if saved["iterator"] is not None:
        items.load_state_dict(copy.deepcopy(saved["iterator"]))
    async for _ in items:
        pass


def as_async_source(index_sampler: Any) -> AsyncIndexSource | None:
    """Return the async source for a loader's index sampler; None for a plain sampler."""
    if type(index_sampler) is BatchSampler and is_async_sampler(index_sampler.sampler):
        sampler, size, drop_last = index_sampler.sampler, index_sampler.batch_size, index_sampler.drop_last
    elif is_async_sampler(index_sampler):
        sampler, size, drop_last = index_sampler, None, False
    else:
        return None
    if isinstance(sampler, Positions):
        from asyncloader.samplers.position_source import PositionSource  # which imports this module

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
