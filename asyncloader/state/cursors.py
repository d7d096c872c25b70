"""Computes parts of a position: cursors, what a state says of the options and the data, and the next epoch's parts.

Data path: dataset_state -> [cursors] -> progress, checkpoint.

A state that is saved between epochs must lead to the epoch that would have come: its base seed, the sampler's order,
and, without workers, the dataset as it will then be. All of these depend on draws from torch's generators, which are
made here in advance, and undone. That holds as long as nothing else draws between `state_dict()` and `iter()`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, IterDataPipe, RandomSampler, SequentialSampler

from asyncloader.base.events import Cursor
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.samplers.async_sampler import AsyncIndexSource
from asyncloader.samplers.generators import draws_when_iterated, generator_text, own_generator, set_generators
from asyncloader.samplers.index_stream import IndexStream, base_sampler, fresh_state
from asyncloader.samplers.seeded import SeededSampler
from asyncloader.workers.fetch.dataset_kinds import digest_of
from asyncloader.workers.fetch.dataset_state import Bookmark
from asyncloader.workers.fetch.seeding import draw_seed, global_generators_kept


def generators(config: EpochConfig, indices: IndexStream | None, finished: bool) -> dict[str, str] | None:
    """Return the states of generators in a position: those from which the order was drawn; of a stream, that from which
    the later epochs are drawn. None: no such numbers.
    """
    drawn = None if indices is None else indices.drawn()
    if not drawn or indices is None:
        return {"own": generator_text(config.generator)} if config.iterable and config.generator is not None else None
    if finished and "own" in drawn:
        return {**drawn, "own": indices.own_state() or drawn["own"]}  # where the next epoch continues
    return dict(drawn)


def continue_generator(config: EpochConfig, saved: dict[str, Any]) -> None:
    """Set the generator of a stream's loader to its state in a saved position."""
    if config.iterable and config.generator is not None and saved["generators"] is not None:
        set_generators(saved["generators"], config.generator)


def described_data(config: EpochConfig, *, find: bool = False) -> dict[str, Any]:
    """Return the length of a map dataset, and the digest of its data; None where it has none, and for a stream. `find`:
    as of `digest_of`.
    """
    found: dict[str, Any] = {"length": None, "data_digest": None}
    if not config.iterable:
        with suppress(Exception):  # torch does not call `len` if a sampler was given, so an error must not surface
            found["length"] = len(config.dataset)
        with suppress(Exception):
            found["data_digest"] = digest_of(config.dataset, find=find)
    return found


def later_cursor(cursor: Cursor | None, assigned: bool) -> Cursor | None:
    """Return `Cursor.epoch_later`. `assigned`: each epoch assigns the shards of the stream once more."""
    if cursor is None:
        return None
    # The state of such an iterator is its place in the shards of this epoch, which the next epoch assigns once more.
    return (cursor._replace(iterator=None) if assigned else cursor).epoch_later()


def reads_by_chance(config: EpochConfig) -> bool:
    """Whether it is not determined which samples a copy of the map dataset reads, and in which order."""
    return config.seeded and not config.iterable and (config.num_workers > 1 or config.concurrent)


def length_or_none(index_sampler: Any) -> int | None:
    """Return its length; None without a length."""
    try:
        return len(index_sampler)
    except TypeError:
        return None


def expectations(config: EpochConfig) -> dict[str, Any]:
    """The part of a state that must agree with the loader that it is loaded into."""
    found = described_options(config) | described_data(config, find=True)
    del found["world_size"]
    return found


def described_options(config: EpochConfig) -> dict[str, Any]:
    """Return `expectations` without the dataset's length and data, which may take long, and are needed only with a
    state; and the number of ranks that share a batch.
    """
    ranks = sharing_ranks(config)
    size, drop_last, sampler = config.batch_size, config.drop_last, config.sampler
    if config.batch_sampler is not None:
        sampler = config.batch_sampler
        if type(sampler) is BatchSampler:
            size, drop_last, sampler = sampler.batch_size, sampler.drop_last, sampler.sampler
    if not config.iterable:
        if config.sampler_ranks is None and config.seeded:
            size = size or 1  # without a batch size: the items of one step
        if size is not None:
            size *= ranks
    arguments = getattr(sampler, "order_arguments", None)
    return {
        "mode": "seeded" if config.seeded else "torch",
        "kind": "iterable" if config.iterable else "map",
        "seed": config.seed,
        "batch_size": size,
        "drop_last": bool(drop_last),
        "order": "stream" if config.iterable else _order(config),
        "arguments": arguments if isinstance(arguments, dict) else None,
        "world_size": ranks,
    }


def sharing_ranks(config: EpochConfig) -> int:
    """The number of ranks that a batch of the state's `batch_size` is shared among."""
    if config.iterable:
        return 1
    if config.sampler_ranks is not None:
        return config.sampler_ranks.world_size
    return config.topology.world_size if config.seeded else 1


def _order(config: EpochConfig) -> str:
    if config.batch_sampler is not None and type(config.batch_sampler) is not BatchSampler:
        return "batch_sampler"
    sampler = config.sampler
    if isinstance(sampler, SequentialSampler) or (type(sampler) is SeededSampler and not sampler.shuffle):
        return "sequential"
    if type(sampler) is SeededSampler and sampler.seed != config.seed:
        return f"shuffled by seed {sampler.seed}"
    if isinstance(sampler, RandomSampler) or type(sampler) is SeededSampler:
        return "shuffled"
    return "sampler"


class Prospect(NamedTuple):
    """Parts of a state as they will be after the next iterator was made."""

    sampler: dict[str, Any] | None = None
    generators: dict[str, str] | None = None
    seeds: dict[str, Any] | None = None
    cursor: Cursor | None = None
    """The cursor of the dataset in this process, if it is read without workers; None if it has no state."""


def of_a_first_epoch(config: EpochConfig, workers_begin: Callable[[], None]) -> Prospect:
    """Predict the first epoch, before any iterator was made. `workers_begin` is called where the loader would start
    workers.
    """
    if config.iterable:
        with _undone(config.generator):
            seeds = _draw_seeds(config)
            return Prospect(None, None, seeds, _dataset_at_rest(config, itself=False))
    found = base_sampler(config.index_sampler)
    sampler: Any = found.sampler if isinstance(found, AsyncIndexSource) else found
    own = own_generator(sampler)
    with _undone(own, config.generator):
        if own is not None and config.num_workers:
            workers_begin()
            if config.batch_sampler is None and draws_when_iterated(sampler):
                iter(sampler)  # torch's iterator with workers asks twice
        seeds = _draw_seeds(config)
        cursor = _dataset_at_rest(config, itself=False)
        generators = None if own is None else {"own": generator_text(own)}
        return Prospect(fresh_state(sampler), generators, seeds, cursor)


def after_an_epoch(config: EpochConfig, *, itself: bool) -> Prospect:
    """Predict the epoch after a completed one. `itself`: whether the dataset is its own iterator. The sampler's state
    is known from the last epoch, and determines a base seed that is drawn from the sampler's own generator.
    """
    if config.persistent_workers and config.num_workers:
        return Prospect()  # persistent workers keep their seeds and generators
    shared = config.generator is not None and own_generator(base_sampler(config.index_sampler)) is config.generator
    with _undone(config.generator):
        seeds = _draw_seeds(config)
        return Prospect(None, None, None if shared else seeds, _dataset_at_rest(config, itself=itself))


@contextlib.contextmanager
def _undone(*generators: torch.Generator | None) -> Generator[None]:
    before = [(each, each.get_state()) for each in generators if each is not None]
    # Without a generator of the loader, the base seed is drawn from torch's global generator; and the user's code that
    # is called here (`__iter__`, `state_dict`) may draw from any.
    with global_generators_kept():
        try:
            yield
        finally:
            for generator, state in before:
                generator.set_state(state)


def _draw_seeds(config: EpochConfig) -> dict[str, Any] | None:
    """Draw as torch's iterator base will. None if its draws cannot be predicted, or come from `seed`."""
    if config.seeded or isinstance(config.dataset, IterDataPipe) or config.assigns_shards:
        return None
    base = draw_seed(config.generator)
    return {"rank": config.topology.rank, "base": base, "shared": None}


def _dataset_at_rest(config: EpochConfig, *, itself: bool) -> Cursor | None:
    """The cursor of this process's dataset before the next ``iter(dataset)``; None if workers or streams have copies of
    it.
    """
    dataset = config.dataset
    if config.num_workers or config.loader_streams or not config.snapshot_every or config.assigns_shards:
        return None
    bookmark = Bookmark(dataset, 1)
    found = _taken(bookmark)
    if found is None and bookmark.keeps_state and config.iterable and not hasattr(type(dataset), "__aiter__"):
        # A dataset that is its own iterator may have no position before `__iter__`. It is called on a copy, because
        # the real one will be called later.
        # The user's `__iter__` may fail on a copy: then no position is predicted.
        with contextlib.suppress(Exception):
            bookmark = Bookmark(copied := copy.copy(dataset), 1)
            bookmark.restore_iterator(iter(copied), None)
            found = _taken(bookmark)
        return found if found is not None and found.itself else None
    return found._replace(itself="before") if found is not None and itself else found


def _taken(bookmark: Bookmark) -> Cursor | None:
    packed = bookmark.initial()
    cursor = None if packed is None else packed.value
    return None if cursor is None or cursor.problem else cursor
