"""The kinds of map datasets."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import BatchSampler, ConcatDataset, DistributedSampler

from asyncloader import (
    AsyncDataLoader,
    Balance,
    BucketBatchSampler,
    DataLoader,
    JoinSequences,
    LanceTable,
    LitDataFolder,
    MegatronTokens,
    MixtureSampler,
    PackedLoader,
    PackingSampler,
    PackSequences,
    RemoteMapDataset,
    SeededSampler,
    SequenceRows,
    StatefulDataLoader,
    StatefulDistributedSampler,
    TokenBudgetBatchSampler,
    TokenFile,
)
from tests.states.kinds import Kind
from tests.states.parts import (
    Awaited,
    AwaitedOrder,
    Batches,
    Counting,
    Drawn,
    Order,
    OrderOfIterators,
    Rows,
    Seeds,
    Sequences,
    number_of,
)

TWO: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork"}
SEEDED: dict[str, Any] = {"seed": 8, "shuffle": True}


def torch_mode(**options: Any) -> DataLoader[Any]:
    given: dict[str, Any] = {"batch_size": 3, **options}
    return DataLoader(Rows(), **given)


def seeded(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    given: dict[str, Any] = {"batch_size": 3, **SEEDED, **options}
    if given.keys() & {"sampler", "batch_sampler"}:
        del given["shuffle"]
    if "batch_sampler" in given:
        del given["batch_size"]
    return DataLoader(Rows() if dataset is None else dataset, **given)


def stateful(dataset: Any = None, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Rows() if dataset is None else dataset, 3, **options)


def remote(name: str) -> Kind:
    """Shards of which any sample can be read. As of the other kinds of files, a state has a digest of them."""
    return Kind(lambda folder: seeded(RemoteMapDataset(f"{folder / name}/"), decode=number_of), needs=needed_for(name))


def needed_for(name: str) -> str:
    """Return the package that reads shards of a format."""
    return "pyarrow" if name == "parquet" else "torch"


def mixture_sampler(**options: Any) -> DataLoader[Any]:
    both: ConcatDataset[Any] = ConcatDataset([Rows(), Rows()])
    return seeded(both, sampler=MixtureSampler(both, [3, 1], 6, **options))


def packing_sampler(**options: Any) -> DataLoader[Any]:
    sampler = PackingSampler(Sequences.lengths, 8, 6, window=7, **options)
    return seeded(SequenceRows(Sequences()), sampler=sampler, batch_size=1, collate_fn=PackSequences())


def packed(make: Any = DataLoader, **options: Any) -> PackedLoader:
    return PackedLoader(make(Sequences(), 6, **SEEDED, collate_fn=JoinSequences(8), **options))


MAP_KINDS: dict[str, Kind] = {
    # ------------------------------------------------------------------------------------------- torch mode
    "torch-sequential": Kind(lambda _: torch_mode()),
    "torch-single-samples": Kind(lambda _: torch_mode(batch_size=None)),
    "torch-shuffled": Kind(lambda _: torch_mode(shuffle=True), later=False),
    "torch-seeds-workers": Kind(lambda _: DataLoader(Seeds(), 3, **TWO), later=False),
    "torch-generator": Kind(
        lambda _: torch_mode(shuffle=True, generator=torch.Generator().manual_seed(3), drop_last=True)
    ),
    "torch-sampler": Kind(lambda _: torch_mode(sampler=[4, 1, 3, 0, 2, 8, 7, 9, 5, 6, 11, 12])),
    "torch-stateful-sampler": Kind(lambda _: torch_mode(sampler=Order())),
    "torch-stateful-sampler-workers": Kind(lambda _: torch_mode(sampler=Order(), **TWO)),
    "torch-stateful-sampler-iterators": Kind(lambda _: torch_mode(sampler=OrderOfIterators())),
    "torch-async-sampler": Kind(lambda _: torch_mode(sampler=AwaitedOrder())),
    "torch-batch-sampler": Kind(lambda _: DataLoader(Rows(), batch_sampler=[[0, 1], [2], [3, 5], [6, 7, 8], [9]])),
    "torch-batch-sampler-of-torch": Kind(lambda _: DataLoader(Rows(), batch_sampler=BatchSampler(Order(), 4, True))),
    "torch-stateful-batch-sampler": Kind(lambda _: DataLoader(Rows(), batch_sampler=Batches())),
    "torch-distributed-sampler": Kind(
        lambda _: torch_mode(sampler=DistributedSampler(Rows(), num_replicas=2, rank=1, seed=4))
    ),
    "torch-stateful-distributed-sampler": Kind(
        lambda _: torch_mode(sampler=StatefulDistributedSampler(Rows(), num_replicas=2, rank=0, seed=4))
    ),
    "torch-stateful-dataset": Kind(lambda _: DataLoader(Counting(), 3)),
    "torch-stateful-dataset-workers": Kind(lambda _: DataLoader(Counting(), 3, **TWO)),
    "torch-async-loader": Kind(lambda _: AsyncDataLoader(Awaited(), 3, sampler=Order())),
    # ------------------------------------------------------------------------------------------- StatefulDataLoader
    "stateful-loader": Kind(lambda _: stateful(shuffle=True)),
    "stateful-loader-workers": Kind(lambda _: stateful(shuffle=True, **TWO)),
    "stateful-loader-stateful-dataset": Kind(lambda _: stateful(Counting())),
    # ------------------------------------------------------------------------------------------- seeded mode
    "seeded": Kind(lambda _: seeded(Drawn())),
    "seeded-in-order": Kind(lambda _: seeded(shuffle=False, drop_last=True)),
    "seeded-single-samples": Kind(lambda _: seeded(batch_size=None)),
    "seeded-left-out": Kind(lambda _: seeded(), prepare=lambda loader, _: loader.skip([1, 5, 6])),
    "seeded-rank": Kind(lambda _: seeded(Drawn(), batch_size=2, rank=1, world_size=2)),
    "seeded-async-loader": Kind(lambda _: AsyncDataLoader(Awaited(), 3, **SEEDED)),
    "seeded-sampler": Kind(lambda _: seeded(sampler=SeededSampler(Rows(), 9))),
    "seeded-stateful-sampler": Kind(lambda _: seeded(sampler=Order())),
    "seeded-async-sampler": Kind(lambda _: seeded(sampler=AwaitedOrder())),
    "seeded-stateful-batch-sampler": Kind(lambda _: seeded(batch_sampler=Batches())),
    "seeded-stateful-dataset": Kind(lambda _: seeded(Counting())),
    "seeded-balance": Kind(
        lambda _: seeded(Sequences(), balance=Balance(Sequences.lengths), rank=1, world_size=2, collate_fn=list)
    ),
    "bucket-batch-sampler": Kind(lambda _: seeded(batch_sampler=BucketBatchSampler(Sequences.lengths, 3, 6, window=9))),
    "bucket-batch-sampler-rank": Kind(
        lambda _: seeded(
            batch_sampler=BucketBatchSampler(Sequences.lengths, 2, 6, window=9, ranks=2), rank=1, world_size=2
        )
    ),
    "token-budget-batch-sampler": Kind(
        lambda _: seeded(batch_sampler=TokenBudgetBatchSampler(Sequences.lengths, 9, 6, window=9))
    ),
    "mixture-sampler": Kind(lambda _: mixture_sampler()),
    "mixture-sampler-stop": Kind(lambda _: mixture_sampler(on_exhausted="stop")),
    "mixture-sampler-drop": Kind(lambda _: mixture_sampler(on_exhausted="drop")),
    "packing-sampler": Kind(lambda _: packing_sampler()),
    "packing-sampler-wrap": Kind(lambda _: packing_sampler(strategy="wrap")),
    "packed-loader": Kind(lambda _: packed()),
    "packed-loader-async": Kind(lambda _: packed(AsyncDataLoader, rank=1, world_size=2)),
    # ------------------------------------------------------------------------------------------- files
    "token-file": Kind(lambda folder: seeded(TokenFile(folder / "tokens", "<u2", 5, stride=4))),
    "megatron-tokens": Kind(lambda folder: seeded(MegatronTokens(folder / "pair"), collate_fn=list)),
    "litdata-folder": Kind(lambda folder: seeded(LitDataFolder(folder / "litdata")), needs="litdata"),
    # In a worker: a process that has used Lance cannot fork.
    "lance-table": Kind(lambda folder: seeded(LanceTable(folder / "lance"), **TWO | {"num_workers": 1}), needs="lance"),
    **{f"remote-map-{name}": remote(name) for name in ("tar", "jsonl", "mds", "parquet")},
}
