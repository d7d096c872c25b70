"""Finds the batches of an epoch that a sample comes in, over all ranks.

Data path: none. Where the order is computed from a seed, the sample's position is computed, too; of another order the
positions are found by reading its indices, which fetches no data.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from asyncloader.ranks.topology import Topology
from asyncloader.samplers.distributed import RankView, Share, tail_of
from asyncloader.samplers.seeded import SeededSampler


class Place(NamedTuple):
    """One occurrence of a sample in an epoch.

    Attributes:
        step: number of the batch, from 0, the same on every rank.
        rank: the rank that gets it.
        number: the sample's number in the batch; 0 where the loader gives single samples.
    """

    step: int
    rank: int
    number: int


def places(sampler: Any, share: Share, index: Any) -> list[Place]:
    """Return all places of a sample in the sampler's present epoch, in ascending order; none if it is left out.

    Args:
        sampler: a sampler, or batch sampler, of known length. One that shards by itself gives the items of its rank
            alone.
        share: the rules by which its items become the ranks' batches.
        index: an index as the sampler gives it; or one that the sampler's own ``is_at(item, index)`` finds in an item.

    Raises:
        ValueError: the items cannot be shared evenly, and `on_uneven` is "error".
    """
    size = len(sampler)
    if share.of_batches:
        found = [(item, at) for item, batch in enumerate(sampler) for at, each in enumerate(batch) if each == index]
        return sorted(Place(step, rank, at) for item, at in found for step, rank, _ in _shares(share, size, item))
    if type(sampler) is SeededSampler:
        items = sampler.positions_of(index)
    else:
        is_at = getattr(sampler, "is_at", operator.eq)
        items = [item for item, each in enumerate(sampler) if is_at(each, index)]
    in_order = sorted(place for item in items for place in _shares(share, size, item))
    if share.balance is None:
        return in_order
    steps = sorted({place.step for place in in_order})
    return [place for step in steps for place in _dealt(sampler, share, step, index)]


def _dealt(sampler: Any, share: Share, step: int, index: Any) -> Iterator[Place]:
    """Yield each place of a sample in a step whose samples are divided by cost."""
    ranks = share.topology.world_size
    for rank in range(ranks):
        view = RankView(sampler, share._replace(topology=Topology(rank, ranks)))
        for batch in islice(view.iter_from(step), 1):
            yield from (Place(step, rank, number) for number, each in enumerate(batch.index) if each == index)


def _shares(share: Share, size: int, item: int) -> Iterator[Place]:
    """Yield each place that a sampler's item number `item` gets; with a batch sampler, `number` is 0."""
    ranks, first_rank = share.topology.world_size, share.replica
    each = share.batch_size or 1
    full, left = divmod(size, each * ranks)
    step, within = divmod(item, each * ranks)
    group = each * ranks  # between two places of an item
    if step == full:
        each, group = tail_of(left, share).each, left  # repeated items come from the beginning of this last group
    for at in range(within, each * ranks, group):
        rank, number = divmod(at, each)
        yield Place(step, first_rank + rank, number)
