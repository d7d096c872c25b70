"""Computes parts of a position for `Progress`: steps, cursors, and what a state says of the options and the data.

Data path: dataset_state -> [cursors] -> progress.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from asyncloader.options.epoch_config import EpochConfig
from asyncloader.samplers.generators import generator_text, set_generators
from asyncloader.samplers.index_stream import IndexStream
from asyncloader.samplers.seeded import SeededSampler
from asyncloader.workers.fetch.dataset_kinds import digest_of
from asyncloader.workers.fetch.dataset_state import Cursor, PackedCursor, pickle_cursor


def value_cursor(cursor: PackedCursor | None) -> Cursor | None:
    """Return the cursor of its packed form."""
    return None if cursor is None else cursor.value


def generators(config: EpochConfig, indices: IndexStream | None, finished: bool) -> dict[str, str] | None:
    """Return the states of generators in a position: those from which the order was drawn; of a stream, that from which
    the later epochs are drawn. None: there are none.
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


def packed_cursor(cursor: Cursor | None) -> PackedCursor | None:
    """Return the packed form of a cursor."""
    return None if cursor is None else pickle_cursor(cursor)


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
    """Return its length; None if it has none."""
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
