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
from asyncloader.samplers.positions import COUNTED, Positions, RestOfPositions

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
                    await dataset.plan_together(self.batch, ranks)
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


def _lane(batch: int, lanes: int, index: PositionedIndex, workers: int) -> int:
    return index.first // batch % (lanes * max(1, workers // lanes))
