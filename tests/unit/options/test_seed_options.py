"""The effect of `seed=` on a loader's options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from asyncloader import DataLoader, SeededSampler
from asyncloader.base.topology import Topology, topology
from asyncloader.options.checks import checks_of
from asyncloader.options.declaration import DEFAULTS, FLAT_DEFAULTS
from asyncloader.options.epoch_config import EpochConfig
from asyncloader.options.objects import flattened
from asyncloader.samplers.distributed import Share, rank_view
from asyncloader.state.cursors import expectations

DATA = TensorDataset(torch.arange(20))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Batches:
    """A user's batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2], [3, 4, 5]])

    def __len__(self) -> int:
        return 3


class ShardOfBatches(Batches):
    """A batch sampler that gives the batches of one process and has the attributes that Accelerate's have."""

    process_index = 1
    num_processes = 3


class Wrapped(BatchSampler):
    """A batch sampler of a framework around the user's sampler."""


def check(*, iterable: bool = False, **changes: Any) -> None:
    given = {"dataset": DATA, "generator": None, **flattened(DEFAULTS), "seed": 1, **changes}
    for check in checks_of(given, FLAT_DEFAULTS, iterable=iterable):
        check()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"seed": -1}, r"seed should be .* but got seed=-1"),
    ({"seed": 1 << 64}, "seed=18446744073709551616"),
    ({"seed": 1.0}, "seed=1.0"),
    ({"seed": "1"}, "seed='1'"),
    ({"seed": True}, "seed=True"),
    ({"generator": torch.Generator()}, "seed=1 and generator exclude one another"),
    ({"seed": None, "rank": 0, "world_size": 2}, "rank=0 and world_size=2 need seed="),
    ({"rank": 0}, "go together, but got rank=0 and world_size=None"),
    ({"world_size": 2}, "go together, but got rank=None and world_size=2"),
    ({"rank": 0, "world_size": 0}, "positive integer, but got world_size=0"),
    ({"rank": 0, "world_size": 2.0}, "world_size=2.0"),
    ({"rank": 2, "world_size": 2}, "between 0 and world_size - 1 = 1, but got rank=2"),
    ({"rank": -1, "world_size": 2}, "rank=-1"),
    ({"rank": "0", "world_size": 2}, "rank='0'"),
    ({"on_uneven": "wrap"}, "one of drop, pad, repeat, error, but got on_uneven='wrap'"),
    ({"on_uneven": None}, "on_uneven=None"),
    ({"iterable": True, "on_uneven": "pad"}, "on_uneven='pad' needs a map dataset"),
    ({"iterable": True, "on_uneven": "repeat"}, "on_uneven='repeat' needs a map dataset"),
    ({"allow_replay": "maybe"}, "True or False, but got allow_replay='maybe'"),
    ({"snapshot_every_n_steps": -1}, "snapshot_every_n_steps=-1"),
    ({"snapshot_every_n_steps": 0.5}, "snapshot_every_n_steps=0.5"),
    ({"reorder_window": -1}, "reorder_window=-1"),
    ({"reorder_window": None}, "reorder_window=None"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=lambda given: re.sub(r"<.*?>", "generator", str(given)))
def test_options_that_are_refused(changes: dict[str, Any], words: str) -> None:
    """The error has the option and its value, and both options where they exclude one another."""
    with pytest.raises(ValueError, match=words):
        check(**changes)


# -------------------------------------------------------------------------------------------- topology


@pytest.fixture
def process_group() -> Iterator[None]:
    """This process is rank 2 of 5 of torch.distributed."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=5)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_torch_distributed_says_who_we_are(process_group: None) -> None:
    """If torch.distributed is initialized, its rank is used; the options take precedence."""
    assert topology(DataLoader(DATA, seed=1)) == Topology(2, 5)
    assert topology(DataLoader(DATA, seed=1, rank=0, world_size=3)) == Topology(0, 3)
    assert len(DataLoader(DATA, seed=1, batch_size=2)) == 2


def test_a_group_says_who_we_are(process_group: None) -> None:
    """The topology is that of the group, a process group or a one-dimensional mesh, before torch.distributed's own."""
    some: Any = torch.distributed.new_group([0, 2])
    assert topology(DataLoader(DATA, seed=1, group=some)) == Topology(1, 2)
    mesh = init_device_mesh("cpu", (5,), mesh_dim_names=("dp",))
    loader = DataLoader(DATA, seed=1, group=mesh)
    assert topology(loader) == Topology(2, 5)
    assert loader.group is mesh
    assert topology(loader.clone(batch_size=2)) == Topology(2, 5)


def test_groups_that_are_refused(process_group: None) -> None:
    """The error names the rank that the group lacks, the dimension to take, or the other option."""
    others: Any = torch.distributed.new_group([0, 1])
    with pytest.raises(ValueError, match="made it of other ranks than this one, 2"):
        DataLoader(DATA, seed=1, group=others)
    mesh = init_device_mesh("cpu", (1, 5), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"of one dimension, but got one of 2\. .*mesh\['dp'\]"):
        DataLoader(DATA, seed=1, group=mesh)
    mine: Any = torch.distributed.new_group([2, 3])
    with pytest.raises(ValueError, match=r"group and rank=0, world_size=2 exclude one another"):
        DataLoader(DATA, seed=1, group=mine, rank=0, world_size=2)
    with pytest.raises(ValueError, match="needs seed="):
        DataLoader(DATA, group=mine)


def share_of(loader: DataLoader[Any]) -> Share:
    base = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    return rank_view(loader, base).share


def test_a_users_batches_are_dealt_out_whole() -> None:
    """A user's batch sampler gives whole batches; torch's plain BatchSampler is replaced by its sampler and size."""
    loader = DataLoader(DATA, seed=1, batch_sampler=Batches(), rank=1, world_size=2)
    assert share_of(loader) == Share(None, False, Topology(1, 2), "drop", of_batches=True)
    plain = BatchSampler(RandomSampler(DATA), 3, drop_last=False)
    loader = DataLoader(DATA, seed=1, batch_sampler=plain, rank=1, world_size=2)
    assert share_of(loader) == Share(3, False, Topology(1, 2), "drop")
    assert rank_view(loader, plain).sampler is plain.sampler


def distributed(rank: int = 1) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, num_replicas=4, rank=rank, shuffle=False)


SHARDED: dict[str, tuple[dict[str, Any], int, int]] = {
    "DistributedSampler": ({"sampler": distributed()}, 1, 4),
    "in a plain batch sampler": ({"batch_sampler": BatchSampler(distributed(), 2, drop_last=False)}, 1, 4),
    "in a framework's": ({"batch_sampler": Wrapped(distributed(), 2, drop_last=False)}, 1, 4),
    "a shard of batches": ({"batch_sampler": ShardOfBatches()}, 1, 3),
}


@pytest.mark.parametrize("given_topology", [{}, {"rank": 1, "world_size": 4}], ids=["alone", "ranks"])
@pytest.mark.parametrize("kind", SHARDED)
def test_what_is_sharded_already_is_not_sharded_again(kind: str, given_topology: dict[str, Any]) -> None:
    """All items of a sampler that is sharded already are this loader's; their positions are still counted globally."""
    arguments, replica, replicas = SHARDED[kind]
    loader = DataLoader(DATA, seed=1, **arguments, **given_topology)
    share = share_of(loader)
    assert share.topology == Topology(0, 1)
    assert (share.replica, share.replicas) == (replica, replicas)
    indices = [i for (batch,) in loader for i in batch.tolist()]
    if "batches" in kind:
        assert indices == [0, 1, 2, 3, 4, 5]
    else:
        assert indices == list(distributed())


# ---------------------------------------------------------------------------- options that a state must agree with


def expected(dataset: Any = DATA, **arguments: Any) -> dict[str, Any]:
    loader = DataLoader(dataset, **arguments)
    return expectations(EpochConfig.of(loader))


def test_what_a_state_names() -> None:
    """A state has the mode, kind, seed, length, global batch, drop_last, and the order's source and arguments."""
    assert expected(seed=3, batch_size=4, shuffle=True, drop_last=True) == {
        "mode": "seeded",
        "kind": "map",
        "seed": 3,
        "length": 20,
        "batch_size": 4,
        "drop_last": True,
        "order": "shuffled",
        "arguments": None,
        "data_digest": None,
    }
    assert expected(Stream(), batch_size=4) == {
        "mode": "torch",
        "kind": "iterable",
        "seed": None,
        "length": None,
        "batch_size": 4,
        "drop_last": False,
        "order": "stream",
        "arguments": None,
        "data_digest": None,
    }


def test_all_ranks_of_all_layouts_expect_the_same() -> None:
    """Only the global batch counts: every number of ranks that divides it expects the same state.

    The ranks' parts are cut by our own sampler or by torch's DistributedSampler.
    """
    whole = expected(seed=3, batch_size=12, shuffle=True)
    for ranks in (1, 2, 3, 4):
        for rank in range(ranks):
            assert expected(seed=3, batch_size=12 // ranks, shuffle=True, rank=rank, world_size=ranks) == whole
    assert expected(sampler=distributed(0), batch_size=3) == expected(sampler=distributed(3), batch_size=3)
    assert expected(sampler=distributed(0), batch_size=3)["batch_size"] == 12


ORDERS: dict[str, list[dict[str, Any]]] = {
    "sequential": [{}, {"seed": 1}, {"sampler": SequentialSampler(DATA)}],
    "shuffled": [{"shuffle": True}, {"seed": 1, "shuffle": True}, {"sampler": RandomSampler(DATA)}],
    "sampler": [{"sampler": list(range(20))}, {"seed": 1, "sampler": list(range(20))}, {"sampler": distributed()}],
    "batch_sampler": [{"batch_sampler": Batches()}, {"seed": 1, "batch_sampler": Batches()}],
}


@pytest.mark.parametrize("order", ORDERS)
def test_where_the_order_comes_from(order: str) -> None:
    """The order is named after the kind of sampler, whether the user or the loader made it."""
    for arguments in ORDERS[order]:
        assert expected(**arguments)["order"] == order


def test_a_users_seed_is_part_of_the_order() -> None:
    """With a SeededSampler of the user's, another seed is another order."""
    for seed in (None, 1):
        one, other = (expected(seed=seed, sampler=SeededSampler(DATA, own)) for own in (5, 6))
        assert one != other
        assert one == expected(seed=seed, sampler=SeededSampler(DATA, 5))
    assert expected(seed=1, sampler=SeededSampler(DATA, 1)) == expected(seed=1, shuffle=True)
