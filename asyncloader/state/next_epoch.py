"""Predicts seeds, order and dataset state of the next epoch, without calling `iter()`.

Data path: beside the sampler; [next_epoch] -> checkpoint.

A state that is saved between epochs must lead to the epoch that would have come: its base seed, the sampler's order,
and, without workers, the dataset as it will then be. All of these depend on draws from torch's generators. They are
made here in advance, and undone. The prediction holds as long as nothing else draws between `state_dict()` and
`iter()`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterDataPipe

from asyncloader.options.epoch_config import EpochConfig
from asyncloader.samplers.async_sampler import AsyncIndexSource
from asyncloader.samplers.generators import draws_when_iterated, generator_text, own_generator
from asyncloader.samplers.index_stream import base_sampler, fresh_state
from asyncloader.workers.fetch.dataset_state import Bookmark, Cursor
from asyncloader.workers.fetch.seeding import draw_seed, global_generators_kept


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
