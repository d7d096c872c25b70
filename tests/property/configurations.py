"""Configurations of a loader, for the property that our loader gives the same batches as torch's.

A configuration is plain data, so that a failing configuration can be read, copied and shrunk. Objects with state
(generators, samplers, datasets) are built from it separately for each loader. Everything that a worker needs is at
module level, because some workers are spawned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
    get_worker_info,
)

# ------------------------------------------------------------------------------------------- datasets


def sample(index: int) -> dict[str, Any]:
    """Return a sample, augmented from each of the three global generators."""
    return {
        "image": torch.rand(2, 3) + index,
        "flipped": random.random() < 0.5,
        "noise": np.random.randn(2).astype(np.float32),
        "crop": (random.randrange(100), torch.randint(100, ()), np.random.randint(100)),
        "index": index,
        "name": f"sample {index}",
    }


class Rows(Dataset[Any]):
    """A map dataset."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return sample(index)


class Batched(Rows):
    """A map dataset that reads a batch's samples at once, in an order of its own."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        found = {place: self[indices[place]] for place in torch.randperm(len(indices)).tolist()}
        return [found[place] for place in range(len(indices))]


class Shares(IterableDataset[Any]):
    """A stream that is split by `get_worker_info`, unevenly; without workers it has all of it."""

    def __init__(self, shares: tuple[int, ...]) -> None:
        self.shares = shares

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, mine = (0, sum(self.shares)) if info is None else (1000 * info.id, self.shares[info.id])
        for i in range(mine):
            yield sample(first + i)


class Whole(IterableDataset[Any]):
    """A stream that is not split: each worker gives all of it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return map(sample, range(self.length))


# Each dataset is built from its length and the shares of the workers.
DATASETS: dict[str, Callable[[int, tuple[int, ...]], Any]] = {
    "rows": lambda length, _: Rows(length),
    "batched": lambda length, _: Batched(length),
    "subset": lambda length, _: Subset(Rows(2 * length), [(7 * i) % (2 * length) for i in range(length)]),
    "subset of batched": lambda length, _: Subset(Batched(length), list(reversed(range(length)))),
    "concatenated": lambda length, _: ConcatDataset([Rows(length // 3), Batched(length - length // 3)]),
    "shares": lambda _, shares: Shares(shares),
    "whole": lambda length, _: Whole(length),
}
STREAMS = ("shares", "whole")


# ------------------------------------------------------------------------------------------- orders


class LazySampler(Sampler[int]):
    """Draws each index from the global generators when the index is asked for; has no length."""

    def __init__(self, length: int, count: int) -> None:
        self.length = length
        self.count = count

    def __iter__(self) -> Iterator[int]:
        for i in range(self.count):
            draw = [lambda: int(torch.rand(()) * 1000), lambda: random.randrange(1000), lambda: np.random.randint(1000)]
            yield int(draw[i % 3]()) % self.length


class EagerSampler(Sampler[int]):
    """Draws all indices when iteration begins, since its `__iter__` is no generator function."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(self.length).tolist())


@dataclass(frozen=True)
class Draw:
    """The values from which an order is built."""

    length: int
    count: int
    batch_size: int
    drop_last: bool
    generator: torch.Generator | None


def _lists(draw: Draw) -> list[list[int]]:
    sizes = [1 + (i * draw.batch_size) % 4 for i in range(draw.count)]
    return [[(i + 3 * j) % draw.length for j in range(size)] for i, size in enumerate(sizes)]


# Each order is arguments of a loader's constructor.
ORDERS: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "default": lambda _: {},
    "unshuffled": lambda _: {"shuffle": False},
    "shuffle": lambda _: {"shuffle": True},
    "sequential": lambda d: {"sampler": SequentialSampler(range(d.length))},
    "list": lambda d: {"sampler": [(5 * i) % d.length for i in range(d.count)]},
    "random": lambda d: {"sampler": RandomSampler(range(d.length), generator=d.generator)},
    "random count": lambda d: {
        "sampler": RandomSampler(range(d.length), num_samples=d.count, generator=d.generator),
    },
    "replacement": lambda d: {
        "sampler": RandomSampler(range(d.length), replacement=True, num_samples=d.count, generator=d.generator),
    },
    "weighted": lambda d: {
        "sampler": WeightedRandomSampler([1.0 / (1 + i) for i in range(d.length)], d.count, generator=d.generator),
    },
    "weighted, once each": lambda d: {
        "sampler": WeightedRandomSampler(
            [1.0 + i for i in range(d.length)], min(d.count, d.length), replacement=False, generator=d.generator
        ),
    },
    "subset random": lambda d: {"sampler": SubsetRandomSampler(range(0, d.length, 2), generator=d.generator)},
    "distributed": lambda d: {
        "sampler": DistributedSampler(Rows(d.length), num_replicas=2, rank=1, seed=5, drop_last=d.drop_last),
    },
    "lazy": lambda d: {"sampler": LazySampler(d.length, d.count)},
    "eager": lambda d: {"sampler": EagerSampler(d.length)},
    "batches": lambda d: {
        "batch_sampler": BatchSampler(
            RandomSampler(range(d.length), generator=d.generator), d.batch_size, drop_last=d.drop_last
        ),
    },
    "batches of a lazy one": lambda d: {
        "batch_sampler": BatchSampler(LazySampler(d.length, d.count), d.batch_size, drop_last=d.drop_last),
    },
    "lists": lambda d: {"batch_sampler": _lists(d)},
}
OF_AN_EMPTY_DATASET = ("default", "unshuffled", "shuffle", "sequential", "subset random", "eager")
OF_BATCHES = ("batches", "batches of a lazy one", "lists")


# ------------------------------------------------------------------------------------------- functions of the user


def keep(samples: Any) -> Any:
    """Return the samples without collation."""
    return samples


def mix(samples: Any) -> Any:
    """Collate with random numbers, into views and containers."""
    batch = default_collate(samples if isinstance(samples, list) else [samples])
    share = torch.rand(()) * random.random()
    image = batch["image"]
    return {"mixed": image * share + image.flip(0) * (1 - share), "turned": image.mT, "all": (batch, [share, None])}


COLLATES: dict[str, Any] = {
    "default": None,
    "collate": default_collate,
    "convert": default_convert,
    "keep": keep,
    "mix": mix,
}


def seed_again(worker: int) -> None:
    """A `worker_init_fn` as users write it: numpy gets a seed of its own."""
    np.random.seed((torch.initial_seed() + worker) % 2**32)
    random.random()


# ------------------------------------------------------------------------------------------- a configuration

LOOPS = ("sync", "asyncio", "uvloop")


@dataclass(frozen=True)
class Configuration:
    """All values that decide which batches a loader gives."""

    dataset: str = "rows"
    length: int = 10
    shares: tuple[int, ...] = (3, 1, 4, 2)  # of "shares": the samples of each of four workers
    order: str = "default"
    count: int = 5  # indices or batches of an order that has its own number of them
    batch_size: int | None = 2
    drop_last: bool = False
    generator: bool = False  # whether the loader is given a generator
    sampler_generator: str = "none"  # "own", or "loader" for the loader's generator
    num_workers: int = 0
    persistent: bool = False
    prefetch_factor: int | None = None
    in_order: bool = True
    init: bool = False
    method: str = "fork"
    collate: str = "default"
    epochs: tuple[int | None, ...] = (None,)  # batches after which each epoch is abandoned; None: never
    trains: bool = False  # whether the consumer draws random numbers between the batches, as a training step does
    loop: str = "sync"  # which of our loaders, and on which event loop
    seed: int = 0

    def generators(self) -> dict[str, torch.Generator]:
        """Return the generators that arguments refer to, seeded."""
        made: dict[str, torch.Generator] = {}
        if self.generator:
            made["loader"] = torch.Generator().manual_seed(self.seed + 1)
        if self.sampler_generator == "own":
            made["sampler"] = torch.Generator().manual_seed(self.seed + 2)
        return made

    def arguments(self, generators: dict[str, torch.Generator]) -> dict[str, Any]:
        """Return a constructor's keyword arguments, built from new objects."""
        arguments: dict[str, Any] = {
            "dataset": DATASETS[self.dataset](self.length, self.shares),
            "generator": generators.get("loader"),
            "collate_fn": COLLATES[self.collate],
            "in_order": self.in_order,
        }
        if self.order not in OF_BATCHES:
            arguments |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if self.dataset not in STREAMS:
            generator = generators.get("sampler" if self.sampler_generator == "own" else self.sampler_generator)
            draw = Draw(self.length, self.count, self.batch_size or 1, self.drop_last, generator)
            arguments |= ORDERS[self.order](draw)
        if self.num_workers:
            arguments |= {
                "num_workers": self.num_workers,
                "persistent_workers": self.persistent,
                "prefetch_factor": self.prefetch_factor,
                "multiprocessing_context": self.method,
                "worker_init_fn": seed_again if self.init else None,
            }
        return arguments

    def repeats_in_torch(self) -> bool:
        """Whether torch's own loader gives the same batches twice.

        It does not where persistent workers are left in the middle of a stream after the stream of one of them has
        ended: the number of tasks that the others then carry out depends on when the end was noticed, and with it
        their random numbers.
        """
        if self.dataset not in STREAMS or not self.persistent:
            return True
        size = self.batch_size or 1
        whole = self.shares if self.dataset == "shares" else (self.length,) * self.num_workers
        batches = [n // size if self.drop_last else -(-n // size) for n in whole[: self.num_workers]]
        for taken in self.epochs:
            tasks = 0 if taken is None else taken + (self.prefetch_factor or 2) * self.num_workers
            shares = [len(range(worker, tasks, self.num_workers)) for worker in range(self.num_workers)]
            if any(share > has for share, has in zip(shares, batches, strict=True)):
                return False
        return True


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    """Draw any configuration that the constructor accepts, and a few that it refuses (shuffling an empty dataset)."""
    dataset = draw(st.sampled_from(list(DATASETS)))
    stream = dataset in STREAMS
    length = draw(st.integers(0, 12 if stream else 30))
    orders = ["default"] if stream else list(ORDERS) if length else list(OF_AN_EMPTY_DATASET)
    order = draw(st.sampled_from(orders))
    batch_size = draw(st.integers(1, 6) if order in OF_BATCHES else st.none() | st.integers(1, 6))
    generator = draw(st.booleans())
    workers = draw(st.sampled_from([0, 1, 2, 3, 4]))
    # About one configuration in fifty: spawned workers take seconds to start.
    method = draw(st.sampled_from(["fork"] * 11 + ["spawn"])) if workers in (1, 2) else "fork"
    persistent = workers > 0 and draw(st.booleans())
    loop = draw(st.sampled_from(["sync", "sync", *LOOPS]))
    # An epoch of an async loader begins with its first batch: see `test_an_iterator_that_was_never_asked`.
    least = 1 if persistent and loop != "sync" else 0
    epochs: list[int | None] = [*draw(st.lists(st.none() | st.integers(least, 5), max_size=2)), None]
    configuration = Configuration(
        dataset=dataset,
        length=length,
        shares=draw(st.tuples(*[st.integers(0, 12)] * 4)),
        order=order,
        count=draw(st.integers(1, 40)),
        batch_size=batch_size,
        drop_last=batch_size is not None and draw(st.booleans()),
        generator=generator,
        sampler_generator=draw(st.sampled_from(["none", "own", "loader"])),
        num_workers=workers,
        persistent=persistent,
        prefetch_factor=draw(st.sampled_from([None, 1, 2, 4])) if workers else None,
        in_order=workers > 1 or draw(st.booleans()),
        init=draw(st.booleans()),
        method=method,
        # without batches, torch's default_collate would take a single sample for a batch
        collate=draw(st.sampled_from([name for name in COLLATES if name != "collate" or batch_size is not None])),
        epochs=tuple(epochs),
        trains=draw(st.sampled_from([True, True, False])),
        loop=loop,
        seed=draw(st.integers(0, 2**31)),
    )
    if configuration.repeats_in_torch():
        return configuration
    return replace(configuration, epochs=(None,) * len(epochs))
