"""Cases of interrupting and resuming a run, for the property that nothing is lost, repeated or changed.

A case is plain data, so that a failing case can be read, copied and shrunk. Datasets and samplers are built from it
separately for each loader, as in another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from asyncloader import Recovery, sample_rng
from tests.property.resume_orders import BATCH_ORDERS, FIXED_WORLD, ORDERS, OWN_GENERATOR
from tests.property.resume_streams import SEVERAL, STREAMS, global_draws, own_draws

# ------------------------------------------------------------------------------------------- map datasets


class Rows(Dataset[Any]):
    """Rows of float64: the index, then random numbers from `draws`."""

    def __init__(self, length: int, draws: Callable[[], list[float]] = list, first: int = 0) -> None:
        self.length = length
        self.draws = draws
        self.first = first

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([self.first + index, *self.draws()], dtype=torch.float64)


def all_draws() -> list[float]:
    return [*global_draws(), *own_draws()]


class Awaited(Rows):
    """Rows made in coroutines that take turns in the middle of a sample's draws."""

    async def __getitem__(self, index: int) -> Any:
        first = own_draws()
        for _ in range(index % 3):
            await asyncio.sleep(0)
        row: torch.Tensor = super().__getitem__(index)
        return torch.cat([row, torch.tensor([*first, *own_draws()], dtype=torch.float64)])


class Transformed(Dataset[Any]):
    """A user's wrapper of a dataset, which draws after the sample was read."""

    def __init__(self, inner: Dataset[Any], length: int) -> None:
        self.inner = inner
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([self.inner[index], torch.rand(1, generator=sample_rng().torch, dtype=torch.float64)])


def mix(samples: Any) -> torch.Tensor:
    """Collate, and add random numbers."""
    batch: torch.Tensor = default_collate(samples) if isinstance(samples, list) else samples
    draws = torch.tensor(all_draws(), dtype=torch.float64)
    return torch.cat([batch, draws.expand(*batch.shape[:-1], -1)], dim=-1)


# Each dataset is built from its length.
DATASETS: dict[str, Callable[[int], Any]] = {
    "rows": Rows,
    "augmented": lambda n: Rows(n, all_draws),
    "own generators": lambda n: Rows(n, own_draws),
    "awaited": Awaited,
    "subset": lambda n: Subset(Rows(2 * n, all_draws), [(7 * i) % (2 * n) for i in range(n)]),
    "subset of awaited": lambda n: Subset(Awaited(n), list(reversed(range(n)))),
    "concatenated": lambda n: ConcatDataset([Rows(n // 3, all_draws), Rows(n - n // 3, all_draws, first=n // 3)]),
    "transformed": lambda n: Transformed(Rows(n, all_draws), n),
}

DRAWLESS = ("rows",)
"""Datasets whose samples draw no random numbers at all: `sample_rng`, too, seeds its generators from the process's."""

# ------------------------------------------------------------------------------------------- a case

LOOPS = ("sync", "asyncio")
PASSAGES = ("as it is", "json", "torch")
"""How a state is passed from one process to the next."""


@dataclass(frozen=True)
class Part:
    """The part of a run that one process carries out: from the state that it got until it is killed."""

    steps: int = 1  # steps from the state on, after which the next state is saved; the last part goes on to the end
    told: bool = False  # if the part stops at the epoch's end: whether the consumer has asked once more, and knows
    lost: int = 0  # steps after the state was saved, which are lost
    workers: int = 0
    prefetch: int | None = None
    world_size: int = 1
    loop: str = "sync"
    persistent: bool = False
    same: bool = False  # no new process: the loader of the previous part goes back to the state
    passage: str = "json"


@dataclass(frozen=True)
class Case:
    """A run with its interruptions."""

    mode: str = "seeded"
    dataset: str = "rows"
    length: int = 10
    order: str = "shuffled"
    global_batch: int | None = 4  # of all ranks
    drop_last: bool = False
    on_uneven: str = "drop"
    in_order: bool = True
    mixes: bool = False  # whether the collation draws random numbers, too
    snapshot_every: int = 1
    seed: int = 1
    first_epoch: int = 0
    before: int = 0  # epochs that are completed before the interrupted epoch
    parts: tuple[Part, ...] = (Part(2), Part())

    @property
    def streams(self) -> bool:
        """Whether the dataset is iterable."""
        return self.dataset in STREAMS

    def arguments(self, part: Part, rank: int, generator_seed: int) -> dict[str, Any]:
        """Return the keyword arguments of one rank's loader."""
        arguments: dict[str, Any] = {"snapshot_every_n_steps": self.snapshot_every, "num_workers": part.workers}
        if part.workers:
            arguments |= {
                "multiprocessing_context": "fork",
                "persistent_workers": part.persistent,
                "in_order": self.in_order,
                "prefetch_factor": part.prefetch,
            }
        if self.mixes:
            arguments["collate_fn"] = mix
        if self.mode == "seeded":
            arguments |= {"seed": self.seed, "rank": rank, "world_size": part.world_size, "on_uneven": self.on_uneven}
        if self.streams:
            arguments["dataset"] = STREAMS[self.dataset](self.length, rank)
            arguments["recovery"] = Recovery(allow_replay=self.dataset in ("plain", "two plain"))
        else:
            arguments["dataset"] = DATASETS[self.dataset](self.length)
            arguments |= ORDERS[self.order](self.length, generator_seed)
        if self.order not in BATCH_ORDERS:
            size = self.global_batch
            arguments["batch_size"] = None if size is None else size if self.streams else size // part.world_size
            arguments["drop_last"] = self.drop_last
        return arguments


@st.composite
def _parts(
    draw: st.DrawFn,
    worlds: list[int],
    *,
    elastic: bool = True,
    out_of_order: bool = False,
    drawn: str = "",
    may_persist: bool = True,
) -> tuple[Part, ...]:
    """Draw two or three parts.

    Args:
        draw: hypothesis's.
        worlds: numbers of ranks to choose from.
        elastic: whether the number of workers may change.
        out_of_order: whether batches are delivered in any order.
        may_persist: whether there may be persistent workers.
        drawn: "own" when the order comes from a generator of the sampler's, "global" from the process's: then no state
            exists before the first batch, and for "global" the next epoch is not determined.
    """
    count = draw(st.sampled_from([2, 2, 3]))
    prefetches = st.sampled_from([None, None, 1, 5])
    parts: list[Part] = []
    for number in range(count):
        last = number == count - 1
        before = parts[-1] if parts else None
        same = before is not None and draw(st.sampled_from([False, False, True]))
        if before is not None and (same or not elastic):
            workers, world = before.workers, before.world_size
        else:
            workers = draw(st.sampled_from([0, 0, 1, 2, 2, 3]))
            # Out of order, the ranks do not stand at the same step: each has its own state.
            world = before.world_size if before is not None and out_of_order else draw(st.sampled_from(worlds))
        parts.append(
            Part(
                steps=0 if last else draw(st.integers(1 if drawn else 0, 12)),
                told=drawn != "global" and draw(st.booleans()),
                lost=0 if last else draw(st.integers(0, 2)),
                workers=workers,
                prefetch=before.prefetch if before is not None and same else draw(prefetches) if workers else None,
                world_size=world,
                loop=before.loop if before is not None and same else draw(st.sampled_from(LOOPS)),
                persistent=before.persistent
                if before is not None and same
                else may_persist and workers > 0 and draw(st.booleans()),
                same=same,
                passage=draw(st.sampled_from(PASSAGES)),
            )
        )
    return tuple(parts)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw any case that can be resumed exactly."""
    mode = draw(st.sampled_from(["seeded", "seeded", "torch"]))
    stream = draw(st.sampled_from([False, False, True]))
    in_order = draw(st.sampled_from([True, True, True, False]))
    first_epoch = draw(st.sampled_from([0, 1, 1 << 40])) if mode == "seeded" else 0
    common: dict[str, Any] = {
        "mode": mode,
        "length": draw(st.integers(2, 40)),
        "snapshot_every": draw(st.sampled_from([1, 1, 0, 3])),
        "seed": draw(st.sampled_from([0, 1, (1 << 64) - 1])),
        "first_epoch": first_epoch,
        "before": draw(st.sampled_from([0, 0, 1])),
        "drop_last": draw(st.booleans()),
    }
    if stream:
        dataset = draw(st.sampled_from(list(STREAMS)))
        size = draw(st.none() | st.integers(1, 6))
        common["drop_last"] = size is not None and common["drop_last"]
        return Case(
            dataset=dataset,
            order="in order",
            global_batch=size,
            in_order=in_order,
            mixes=mode == "seeded" and draw(st.booleans()),
            parts=draw(_parts([1], elastic=dataset in SEVERAL)),  # streams of several ranks need a process group
            **common,
        )
    orders = [name for name in ORDERS if mode == "torch" or name != "loader's generator"]
    order = draw(st.sampled_from(["shuffled", "shuffled", *orders]))
    worlds = [1] if mode == "torch" or order in FIXED_WORLD else [1, 2, 3, 4]
    batches = order in BATCH_ORDERS
    drawn = "own" if order in OWN_GENERATOR else "global" if (mode, order) == ("torch", "shuffled") else ""
    size = None
    if not batches:
        size = draw(st.sampled_from([12, 12, 24])) if len(worlds) > 1 else draw(st.none() | st.integers(1, 6))
        if len(worlds) > 1 and draw(st.booleans()):
            size, worlds = draw(st.integers(1, 6)), [1]
    elif len(worlds) > 1:
        worlds = [draw(st.sampled_from([1, 2, 3]))]  # the number of ranks decides the size of a step
    common["drop_last"] = size is not None and common["drop_last"]
    shares = drawn == "global" or order == "loader's generator"
    dataset = draw(st.sampled_from(list(DATASETS)))
    # The iterator of persistent workers draws no base seed for later epochs, which would move a shared generator.
    parts = draw(_parts(worlds, out_of_order=not in_order, drawn=drawn, may_persist=not shares))
    if drawn == "global" and dataset not in DRAWLESS and parts[0].workers:
        # With torch's loader, too, an epoch's order depends on the draws of earlier epochs in this process: samples
        # that draw move its generator without workers, as in the run used for comparison, and do not where workers make
        # them. So only the first epoch's order is the same with workers and without.
        common["before"] = 0
    return Case(
        dataset=dataset,
        order=order,
        global_batch=size,
        on_uneven=draw(st.sampled_from(["drop", "drop", "repeat", "pad"])) if mode == "seeded" else "drop",
        in_order=in_order,
        mixes=mode == "seeded" and worlds == [1] and draw(st.booleans()),
        parts=parts,
        **common,
    )
