"""Computes one rank's share of an epoch's global order in seeded mode, and the rank topology.

Data path: sampler -> [distributed] -> scheduler.

The order is cut into global batches of ``batch_size * world_size`` items. Each rank takes its part of every global
batch, so that at each step the ranks' batches, joined in rank order, are the batch that a single rank would get:

    order          0 1 2 3 4 5 6 7 8 9 ...          batch_size 2, world_size 2
    step           [   0   ] [   1   ]
    rank           [ 0][ 1 ] [ 0][ 1 ]

Items are indices, or whole batches if the user's own batch sampler makes them. Each item carries its position in the
global order, from which its random numbers are derived.

Fewer items than a global batch may be left at the end. The `on_uneven` rule shares them evenly; repeated items come
from the beginning of this last, incomplete group.

Pure, except that `topology` gets the rank from torch.distributed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sized
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.utils.data import BatchSampler, DistributedSampler

from asyncloader.base.events import PositionedIndex
from asyncloader.base.topology import Topology, topology
from asyncloader.samplers.balance import Balance
from asyncloader.samplers.generators import samplers_within
from asyncloader.samplers.seeded import SeededSampler
from asyncloader.samplers.surviving import Groups, Restarting

OnUneven = Literal["drop", "pad", "repeat", "error"]
ON_UNEVEN: tuple[str, ...] = get_args(OnUneven)

BATCH_STRIDE = 1 << 32
"""Batch i of a user's batch sampler has the positions from ``i * BATCH_STRIDE`` on; a batch may have any length below
this."""

_BLOCK = 4096

Indices = npt.NDArray[np.int64]


@runtime_checkable
class SeekableSampler(Protocol):
    """A sampler, or batch sampler, that can start at any position of its epoch without producing earlier items."""

    def iter_from(self, start: int) -> Iterator[Any]:
        """Return the current epoch's items from number `start` on. ValueError: the epoch has fewer."""
        ...


class Share(NamedTuple):
    """The rules by which a sampler's items become a rank's batches.

    `batch_size` is None if each item is a step's index. `replicas` is above 1 for a sampler that shards by itself and
    returns only the items of a rank: its item i has the global position ``i * replicas + replica``. `balance` divides
    each global batch by cost, instead of in the order of its items.
    """

    batch_size: int | None
    drop_last: bool
    topology: Topology
    on_uneven: OnUneven
    of_batches: bool = False
    replicas: int = 1
    replica: int = 0
    balance: Balance | None = None


class Tail(NamedTuple):
    """The shares of the items after the last full global batch; the same for every rank.

    Each rank gets `each` items (0: no further step). Over all ranks `dropped` items are left out, and `repeated` items
    come a second time.
    """

    each: int
    dropped: int
    repeated: int


def tail_of(left: int, share: Share) -> Tail:
    """Return the tail of `left` items, fewer than a global batch.

    Raises:
        ValueError: the items cannot be shared evenly, and `on_uneven` is "error".
    """
    ranks = share.topology.world_size
    if not left:
        return Tail(0, 0, 0)
    if share.drop_last:
        return Tail(0, left, 0)
    if share.on_uneven == "pad":
        each = share.batch_size or 1
        return Tail(each, 0, each * ranks - left)
    if left % ranks == 0:
        return Tail(left // ranks, 0, 0)
    if share.on_uneven == "drop":
        return Tail(left // ranks, left % ranks, 0)
    if share.on_uneven == "repeat":
        each = -(-left // ranks)
        return Tail(each, 0, each * ranks - left)
    what = "batches" if share.of_batches else "samples"
    raise ValueError(
        f"the epoch's last {left} {what} cannot be shared evenly by world_size={ranks} ranks (on_uneven='error'); "
        "use on_uneven='drop', 'repeat' or 'pad', or drop_last=True"
    )


class Cutter:
    """Cuts a stream of items into one rank's steps.

    Args:
        share: the rules.
    """

    def __init__(self, share: Share) -> None:
        self._share = share
        self.stride = (share.batch_size or 1) * share.topology.world_size
        """Number of items per call of `cut`."""
        self.dropped = 0
        self.repeated = 0
        self.padding: tuple[int, int] | None = None
        """The number of the step that ends with repeated samples of this rank, and their number; None: no such step."""

    def cut(self, step: int, group: list[Any]) -> PositionedIndex | None:
        """Return this rank's part of the `stride` items of a step, or of fewer at the end; None if its part is empty.
        May be repeated, with the same result.

        Raises:
            ValueError: the error of `tail_of`.
        """
        first, rank = step * self.stride, self._share.topology.rank
        if len(group) == self.stride:
            return part_of(self._share, first, group)
        each, self.dropped, self.repeated = tail_of(len(group), self._share)
        if not each:
            return None
        if not self.repeated:
            return part_of(self._share, first, group[: each * self._share.topology.world_size])
        mine = rank * each
        filling = min(each, max(0, mine + each - len(group)))
        if filling:
            self.padding = step, filling
        # Repeated items come from the beginning of this group, and may repeat it more than once.
        filled = list(itertools.islice(itertools.cycle(group), len(group) + self.repeated))
        return add_position(self._share, first + mine, filled[mine : mine + each])


def part_of(share: Share, first: int, group: list[Any]) -> PositionedIndex:
    """Return a rank's part of items that all ranks share evenly; `first` is the number of the first item.

    Raises:
        The errors of `Balance.costs`.
    """
    rank, ranks = share.topology
    if share.balance is None:
        each = len(group) // ranks
        return add_position(share, first + rank * each, group[rank * each : (rank + 1) * each])
    mine = share.balance.deal(group, ranks)[rank]
    return PositionedIndex(tuple([first + offset for offset in mine]), [group[offset] for offset in mine])


def add_position(share: Share, first: int, items: list[Any]) -> PositionedIndex:
    """Add the position to a rank's items of a step; `first` is the number of the first item."""
    if share.of_batches:
        return PositionedIndex((first * share.replicas + share.replica) * BATCH_STRIDE, items[0])
    return PositionedIndex(first * share.replicas + share.replica, items if share.batch_size is not None else items[0])


class RankView:
    """The index stream of one rank: an iterable of a `PositionedIndex` per step.

    Args:
        sampler: a sampler of indices or of batches; iterated once per epoch. ``len()`` works if it has a length.
        share: the rules.
    """

    def __init__(self, sampler: Any, share: Share) -> None:
        self.sampler = sampler
        self.share = share
        self.cutter = Cutter(share)
        """The newest iterator's cutter, which has the numbers of items dropped and repeated at the end."""

    def __len__(self) -> int:
        """The number of steps in an epoch, the same for every rank. TypeError: the sampler has no length."""
        full, left = divmod(len(self.sampler), self.cutter.stride)
        return full + (tail_of(left, self.share).each > 0)

    def tail(self) -> Tail:
        """Return the shares of the items after the last full global batch; without a length, known only at the end."""
        if not hasattr(self.sampler, "__len__"):
            return Tail(0, self.cutter.dropped, self.cutter.repeated)
        return tail_of(len(self.sampler) % self.cutter.stride, self.share)

    def __iter__(self) -> Iterator[PositionedIndex]:
        return self.iter_from(0)

    def iter_from(self, step: int, items: Iterator[Any] | None = None) -> Iterator[PositionedIndex]:
        """Return the steps from number `step` on.

        Args:
            step: 0 for the whole epoch.
            items: the sampler's items from that step on, if the caller has them. None: a seekable sampler starts at the
                step; of another sampler, the items before are read and dropped.
        """
        cutter = self.cutter = Cutter(self.share)
        if items is None and type(self.sampler) is SeededSampler:
            return self._compute(cutter, self.sampler, step)
        # As in torch: the generator that makes batches of indices ends with an error, and a user's batches may go on.
        goes_on = self.share.of_batches
        begin = partial(self._items, step * cutter.stride, items)
        return Groups(begin, cutter.stride, cutter.cut, step, goes_on=goes_on)

    def _items(self, skip: int, items: Iterator[Any] | None) -> Iterator[Any]:
        if items is not None:
            return items
        if isinstance(self.sampler, SeekableSampler):
            return seek(self.sampler, skip, self.cutter.stride)
        return itertools.islice(iter(self.sampler), skip, None)

    def _compute(self, cutter: Cutter, sampler: SeededSampler, step: int) -> Iterator[PositionedIndex]:
        """Compute only this rank's indices."""
        # Read now, not at the first step: `set_epoch` for the next epoch may be called in between.
        size, order = len(sampler), sampler.order()
        return Restarting(lambda at: self._blocks(cutter, size, order, at), step)

    def _blocks(
        self, cutter: Cutter, size: int, order: Callable[[Indices], Indices], step: int
    ) -> Iterator[PositionedIndex]:
        stride, each = cutter.stride, self.share.batch_size or 1
        rank, batched = self.share.topology.rank, self.share.batch_size is not None
        full = size // stride
        balanced = self.share.balance is not None
        # All ranks' items, where they are divided by cost.
        begin, end = (0, stride) if balanced else (rank * each, (rank + 1) * each)
        steps_a_block = max(1, _BLOCK // (end - begin))
        for first in range(step, full, steps_a_block):
            steps = np.arange(first, min(first + steps_a_block, full), dtype=np.int64)
            positions = steps[:, None] * stride + np.arange(begin, end, dtype=np.int64)
            for at, row in zip(positions[:, 0].tolist(), order(positions).tolist(), strict=True):
                if balanced:
                    yield part_of(self.share, at, row)
                    continue
                # `add_position` without its call, whose time would show: no sampler has shared these indices before.
                yield PositionedIndex(at, row if batched else row[0])
        if step <= full:
            item = cutter.cut(full, order(np.arange(full * stride, size, dtype=np.int64)).tolist())
            if item is not None:
                yield item


def seek(sampler: SeekableSampler, skip: int, size: int) -> Iterator[Any]:
    """Return the items after the first `skip`, which are whole steps of `size` items; the last step may be short."""
    if isinstance(sampler, Sized):
        return sampler.iter_from(min(skip, len(sampler)))
    # Without a length only the beginning of the last step is sure to be within the epoch.
    items = sampler.iter_from(max(0, skip - size))
    for _ in itertools.islice(items, min(skip, size)):
        pass
    return items


def plain_sampler(spec: Any) -> Any:
    """Return the sampler of indices that determines the loader's order; None if the loader has none.

    With a user's batch sampler, torch sets `loader.sampler` to an unused sampler. If that batch sampler is a plain
    `BatchSampler`, its inner sampler determines the order.
    """
    if type(spec.batch_sampler) is BatchSampler:
        return spec.batch_sampler.sampler
    return getattr(spec, "sampler", None)


def replicas(*samplers: Any) -> Topology | None:
    """Return the topology of the first sampler that shards by itself, or reads from such a sampler; None for others."""
    for each in samplers_within(*samplers):
        if isinstance(each, DistributedSampler):
            return Topology(each.rank, each.num_replicas)
        # Accelerate's BatchSamplerShard and similar samplers; and copies of DistributedSampler.
        for names in (("process_index", "num_processes"), ("rank", "num_replicas"), ("rank", "world_size")):
            rank, size = getattr(each, names[0], None), getattr(each, names[1], None)
            if isinstance(rank, int) and isinstance(size, int):
                return Topology(rank, size)
    return None


def rank_view(spec: Any, index_sampler: Any) -> RankView:
    """Return the rank's share of the index sampler's order, for a map dataset in seeded mode.

    A sampler that shards by itself is not sharded again.
    """
    of_batches = spec.batch_sampler is not None and type(spec.batch_sampler) is not BatchSampler
    sampler = index_sampler.sampler if type(index_sampler) is BatchSampler else index_sampler
    own = replicas(sampler)
    batched = type(index_sampler) is BatchSampler
    here = topology(spec) if own is None else Topology(0, 1)
    balance = spec._asyncloader_options.balance
    if balance is not None and own is not None:
        raise ValueError(
            f"balance= needs the whole order, of which {type(sampler).__name__} gives only this rank's part. Leave "
            "sharding to the loader: give it a sampler of all samples, or shuffle=True"
        )
    share = Share(
        batch_size=index_sampler.batch_size if batched else None,
        drop_last=bool(index_sampler.drop_last) if batched else False,
        topology=here,
        on_uneven=spec._asyncloader_options.on_uneven,
        of_batches=of_batches,
        replicas=1 if own is None else own.world_size,
        replica=0 if own is None else own.rank,
        balance=None if here.world_size == 1 else balance,
    )
    return RankView(sampler, share)
