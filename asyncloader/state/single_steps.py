"""Addresses single steps of an epoch in seeded mode: makes the loader of a batch, and states that leave steps out.

Data path: none. In seeded mode a batch of a map dataset follows from epoch, step and rank, so the state that a run
would have saved before it is written down without the run. The batches that a sample comes in, over all ranks, are
computed where the order is; of another order they are found by reading its indices, which fetches no data.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch.utils.data import BatchSampler, SequentialSampler

from asyncloader.errors import StateError
from asyncloader.options.checks import warn_only_of
from asyncloader.options.clone import constructor_arguments
from asyncloader.options.declaration import LoaderSpec
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.ranks.topology import Topology
from asyncloader.samplers.async_sampler import PositionSource
from asyncloader.samplers.distributed import RankView, SeekableSampler, Share, tail_of
from asyncloader.samplers.index_stream import base_sampler
from asyncloader.samplers.seeded import SeededSampler
from asyncloader.workers.source import THREADS

if TYPE_CHECKING:
    from asyncloader.async_loader import AsyncDataLoader
    from asyncloader.loader import DataLoader
    from asyncloader.state.checkpoint import StateKeeper


T = TypeVar("T")


def loader_without_workers(spec: LoaderSpec[Any], make: Callable[..., T], rank: int | None) -> T:
    """Return a loader like `spec` for single batches: of this rank (None: its own), without workers and device.

    Raises:
        ValueError: the loader's batches do not follow from epoch and step, or there is no such rank.
    """
    config = _checked(spec)
    here = config.topology
    if rank is not None and rank not in range(here.world_size):
        raise ValueError(f"rank should be between 0 and {here.world_size - 1}, but got rank={rank!r}")
    changes = {
        "num_workers": 0 if config.workers in (None, THREADS) else 1,  # a service's dataset is not in this process
        "device": None,
        "device_transform": None,
        "pin_memory": False,
        "group": None,
        "rank": here.rank if rank is None else rank,
        "world_size": here.world_size,
    }
    arguments = constructor_arguments(spec, changes)
    for name in ("sampler", "batch_sampler"):
        if name in arguments:
            arguments[name] = _copied(arguments[name])
    with warn_only_of(()):
        return make(**arguments)


def begin_at(loader: DataLoader[Any] | AsyncDataLoader[Any], keeper: StateKeeper, epoch: int, step: int) -> None:
    """Let a loader that has not begun, whose `keeper` this is, begin with a step.

    Raises:
        IndexError: the epoch has fewer steps.
        ValueError: epoch or step is not a number from 0 on.
    """
    epoch, step = _checked_number("epoch", epoch), _checked_number("step", step)
    if epoch >= 1 << 63:
        raise ValueError(f"epoch should be below 2**63, but got epoch={epoch}")
    keeper.alone = True  # other ranks need not make this batch, too
    try:
        loader.load_state_dict(_before(loader.state_dict(), epoch, step))
    except StateError as error:
        raise no_step(epoch, step) from error


def no_step(epoch: int, step: int) -> IndexError:
    """Return the error for a step behind the epoch's end."""
    return IndexError(f"epoch {epoch} has no step {step}: it has fewer batches")


def check_step(state: dict[str, Any], epoch: int, step: int) -> None:
    """Check that the batch of the step came. `state`: the loader's after the first batch.

    Raises:
        LookupError: another batch came, because all samples of this step were skipped.
    """
    if state["step"] != step + 1:
        raise LookupError(f"step {step} of epoch {epoch} has no batch: all of its samples were skipped (on_error)")


def places_of(spec: LoaderSpec[Any], index: Any, epoch: int) -> list[Place]:
    """Return the places of a sample in an epoch. See `DataLoader.where`.

    Raises:
        ValueError: the loader's batches do not follow from epoch and step, or its order has no indices.
    """
    view = _checked(spec, indexed=True).index_sampler
    sampler = _copied(view.sampler)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    return places(sampler, view.share, index)


def without_steps(spec: LoaderSpec[Any], state: dict[str, Any], steps: Iterable[int]) -> dict[str, Any]:
    """Return the state with these steps marked as delivered. See `DataLoader.skip`.

    Args:
        spec: the loader's options.
        state: the position from which its next iterator begins.
        steps: numbers of steps; those that were delivered make no difference.

    Raises:
        IndexError: the epoch has fewer steps.
        ValueError: the loader's batches do not follow from epoch and step, or a step is not a number from 0 on.
    """
    config, left_out = _checked(spec), {_checked_number("each step", step) for step in steps}
    if state["finished"]:
        state = _before(state, state["epoch"] + 1, 0) | {"sampler": None, "seeds": None}
    with suppress(TypeError):  # the number is not known yet
        if left_out and max(left_out) >= (length := len(config.index_sampler)):
            raise IndexError(f"step {max(left_out)} cannot be left out: the epoch has {length} batches")
    at, beyond = state["step"], left_out.union(state["beyond"])
    while at in beyond:
        at += 1
    return {**state, "step": at, "beyond": sorted(step for step in beyond if step > at)}


def _before(state: dict[str, Any], epoch: int, step: int) -> dict[str, Any]:
    """Return the state with the position before a step."""
    return {**state, "epoch": epoch, "step": step, "beyond": [], "finished": False}


def _checked_number(name: str, value: Any) -> int:
    # Also an integer of numpy or torch: steps are found by comparing losses.
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"{name} should be an integer from 0 on, but got {value!r}")
    return number


def _checked(spec: LoaderSpec[Any], *, indexed: bool = False) -> EpochConfig:
    """Return the options as they are now. `indexed`: the dataset's samples must have indices.

    Raises:
        ValueError: the loader's batches do not follow from epoch and step.
    """
    config = EpochConfig.of(spec)
    sampler = base_sampler(config.index_sampler)
    why = ""
    if not config.seeded:
        why = "the loader has no seed=, so that its batches depend on what was drawn before"
    elif config.iterable:
        why = "the dataset is iterated, and its samples are reached by reading those before; a RemoteIterableDataset "
        why += "needs streams="
    elif config.stateful:
        why = "the dataset has a state (state_dict), so that its samples depend on those that were read before"
    elif indexed and isinstance(config.source, PositionSource):
        raise ValueError(
            "where() finds a sample by its index, and the samples of streams have no indices; batch_at(step, "
            "epoch=...) makes any batch of this loader"
        )
    elif isinstance(config.source, PositionSource) and config.source.sampler.changed:
        why = "the order has changed by feedback, which only the loader's own iterators follow"
    elif config.source is not None and not isinstance(config.source, PositionSource):
        why = "the sampler is async, and is read from its beginning"
    elif config.source is None and not isinstance(sampler, SeekableSampler | SequentialSampler | Sequence):
        why = f"{type(sampler).__name__} has no iter_from(start), which gives its indices from a position on"
    if why:
        raise ValueError(f"single steps cannot be addressed: {why}")
    return config


def _copied(sampler: Any) -> Any:
    """Return a copy, on which another epoch can be set."""
    copied = copy.copy(sampler)
    if type(copied) is BatchSampler:
        copied.sampler = copy.copy(copied.sampler)
    return copied


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
