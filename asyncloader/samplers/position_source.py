"""Makes a rank's steps of a dataset's own order, once the number of its samples is known.

Data path: positions -> [position_source] -> scheduler.

The number is known when the main process has planned the first epoch, so the steps are read as those of an async
sampler. They are computed from any step on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncloader.events import PositionedIndex
from asyncloader.samplers.async_sampler import AsyncIndexSource, ReadingPosition
from asyncloader.samplers.distributed import RankView
from asyncloader.samplers.index_stream import StateLog
from asyncloader.samplers.positions import Positions, RestOfPositions

if TYPE_CHECKING:
    from asyncloader.ranks.exchange import RankExchange


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
        return partial(_lane, self.batch, self.sampler.dataset.lanes)

    @property
    def batch(self) -> int:
        """Samples in a global batch."""
        return (self.share.batch_size or 1) * self.share.topology.world_size

    def first_log(self, _: int, /) -> StateLog | None:
        """Return None: the state is noted by `read`, once the shards are known."""
        return None

    async def plan(self) -> None:
        """Count the samples, unless that was done. Errors as `plan_streams`."""
        await self.sampler.dataset.plan_streams(self.batch, self.ranks)

    async def read(self, position: ReadingPosition) -> AsyncIterator[Any]:
        """Yield the indices from a position on. See `AsyncIndexSource.read`."""
        saved, ended = position.saved_sampler, position.drained
        await self.plan()
        order = self.sampler
        if saved is not None:
            order.load_state_dict(saved["sampler"])
            if before := saved["sampler"].get("before"):
                order = RestOfPositions(order, before)
        elif ended is not None:
            order.follow(ended["sampler"])
        position.log = _PresentState(order)
        view = position.view = RankView(order.sampler(position.epoch), self.share)
        position.total = len(view)
        first, task = position.first_step, 0
        # Known only now: steps were left out before the samples were counted, or the state is broken.
        last = max([first, *(step + 1 for step in position.skipped)])
        if last > position.total:
            raise IndexError(f"epoch {position.epoch} has no step {last - 1}: it has {position.total} batches")
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


def _lane(batch: int, lanes: int, index: PositionedIndex, workers: int) -> int:
    return index.first // batch % (lanes * max(1, workers // lanes))
