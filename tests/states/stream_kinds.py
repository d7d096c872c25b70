"""The kinds of streams: iterable datasets, shards, mixtures and graphs of datapipes."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch.utils.data.datapipes.iter import IterableWrapper

from asyncloader import (
    AsyncDataLoader,
    DataLoader,
    JoinSequences,
    Mixture,
    PackedLoader,
    Recovery,
    RemoteIterableDataset,
    StatefulDataLoader,
)
from asyncloader.dataloader2 import (
    DataLoader2,
    InProcessReadingService,
    MultiProcessingReadingService,
    SequentialReadingService,
)
from asyncloader.transports import LocalTransport
from tests.states.files import COUNT
from tests.states.kinds import Kind
from tests.states.map_kinds import TWO, needed_for
from tests.states.parts import (
    AwaitedStream,
    OwnIterator,
    Plain,
    Rows,
    Sequences,
    SequenceStream,
    Stream,
    StreamOfIterators,
    ThreeStreams,
    number_of,
)


def stream(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 3, **options)


def dataset_of(folder: Path, name: str, **options: Any) -> RemoteIterableDataset:
    """Shards whose URLs are below the folder: a state is that of URLs, and a test has another folder each time."""
    return RemoteIterableDataset(f"{name}/", transport=LocalTransport(folder), **options)


def shards(folder: Path, name: str, make: Any = DataLoader, **options: Any) -> Any:
    """A loader of shards; options of the dataset by the prefix ``of_``."""
    own = {key.removeprefix("of_"): options.pop(key) for key in list(options) if key.startswith("of_")}
    return make(dataset_of(folder, name, **own), 3, **{"decode": number_of, **options})


def shards_of(name: str) -> Kind:
    return Kind(lambda folder: shards(folder, name), needs=needed_for(name))


def fixed(folder: Path, name: str = "tar", **options: Any) -> Any:
    return shards(folder, name, **{"seed": 8, "of_streams": 3, **options})


def elastic(folder: Path, batch_size: int = 3) -> DataLoader[Any]:
    dataset = dataset_of(folder, "tar", streams=3, shuffle_buffer=4, elastic="set")
    return DataLoader(dataset, batch_size, seed=8, decode=number_of)


def after_larger_batches(loader: Any, folder: Path) -> None:
    """Go on from a state of batches of 4."""
    with elastic(folder, 4) as before:
        batches = iter(before)
        next(batches)
        loader.load_state_dict(before.state_dict())


def mixture(folder: Path, **options: Any) -> DataLoader[Any]:
    streams = dataset_of(folder, "tar", streams=2, shuffle_buffer=4), dataset_of(folder, "jsonl", streams=2)
    return DataLoader(Mixture([Numbered(), *streams], [3, 2, 1], **options), 3, seed=8, decode=number_of)


class Numbered(Rows):
    """Rows that are decoded as the samples of shards."""

    def __getitem__(self, index: int) -> Any:
        return {"n": 100 + index}


def sequence_of(sample: dict[str, Any]) -> Any:
    return Sequences()[number_of(sample)]


def graph(service: Any, **parts: int) -> DataLoader2[Any]:
    """Functions have no place in it: a state has the graph, pickled."""
    pipe: Any = IterableWrapper(range(COUNT))
    for name, argument in parts.items():
        pipe = getattr(pipe, name)(buffer_size=argument)
    pipe = pipe.sharding_filter().batch(3)
    loader = DataLoader2[Any](pipe, reading_service=service)
    loader.seed(8)
    return loader


JOINED: dict[str, Any] = {"batch_size": 6, "collate_fn": JoinSequences(8)}
REPLAY = Recovery(allow_replay=True)

STREAM_KINDS: dict[str, Kind] = {
    # ------------------------------------------------------------------------------------------- iterable datasets
    "stream": Kind(lambda _: stream(Stream())),
    "stream-workers": Kind(lambda _: stream(Stream(), **TWO)),
    "stream-seeded-workers": Kind(lambda _: stream(Stream(), seed=8, **TWO)),
    "stream-iterators": Kind(lambda _: stream(StreamOfIterators())),
    "stream-iterators-workers": Kind(lambda _: stream(StreamOfIterators(), **TWO)),
    "stream-own-iterator": Kind(lambda _: stream(OwnIterator())),
    "stream-own-iterator-workers": Kind(lambda _: stream(OwnIterator(), persistent_workers=True, **TWO)),
    "stream-async": Kind(lambda _: AsyncDataLoader(AwaitedStream(), 3)),
    "stream-snapshots": Kind(lambda _: stream(Stream(), snapshot_every_n_steps=2, **TWO), taken=5),
    "stream-replayed": Kind(lambda _: stream(Plain(), recovery=REPLAY)),
    "stream-replayed-workers": Kind(lambda _: stream(Plain(), recovery=REPLAY, **TWO)),
    "stream-stateful-loader": Kind(lambda _: StatefulDataLoader(StreamOfIterators(), 3)),
    "stream-stateful-loader-workers": Kind(lambda _: StatefulDataLoader(Stream(), 3, **TWO)),
    "declared-streams": Kind(lambda _: stream(ThreeStreams())),
    "declared-streams-seeded": Kind(lambda _: stream(ThreeStreams(), seed=8, **TWO)),
    "datapipe": Kind(
        lambda _: stream(IterableWrapper(range(COUNT)).shuffle().sharding_filter(), recovery=REPLAY), later=False
    ),
    # ------------------------------------------------------------------------------------------- shards
    **{f"shards-{name}": shards_of(name) for name in ("tar", "jsonl", "jsonl.gz", "mds", "parquet")},
    "shards-workers": Kind(lambda folder: shards(folder, "tar", **TWO)),
    "shards-mds-workers": Kind(lambda folder: shards(folder, "mds", **TWO)),
    "shards-shuffled": Kind(lambda folder: shards(folder, "tar", of_shuffle_buffer=4), later=False),
    "shards-generator": Kind(
        lambda folder: shards(folder, "tar", shuffle=True, generator=torch.Generator().manual_seed(3))
    ),
    "shards-seeded": Kind(lambda folder: shards(folder, "tar", of_shuffle_buffer=4, seed=8)),
    "shards-seeded-workers": Kind(lambda folder: shards(folder, "jsonl", of_shuffle_buffer=4, seed=8, **TWO)),
    "shards-async": Kind(lambda folder: shards(folder, "tar", AsyncDataLoader, of_shuffle_buffer=4, seed=8)),
    "fixed-streams": Kind(fixed),
    "fixed-streams-shuffled": Kind(lambda folder: fixed(folder, "mds", of_shuffle_buffer=4)),
    "fixed-streams-rank": Kind(lambda folder: fixed(folder, of_streams=2, rank=1, world_size=2)),
    "fixed-streams-left-out": Kind(fixed, prepare=lambda loader, _: loader.skip([1, 5])),
    "fixed-streams-elastic": Kind(elastic, prepare=after_larger_batches),
    "fixed-streams-async": Kind(lambda folder: fixed(folder, "jsonl", make=AsyncDataLoader)),
    # ------------------------------------------------------------------------------------------- mixtures
    "mixture": Kind(mixture),
    "mixture-passes": Kind(lambda folder: mixture(folder, num_samples=100), taken=30),
    "mixture-stop": Kind(lambda folder: mixture(folder, on_exhausted="stop")),
    "mixture-drop": Kind(lambda folder: mixture(folder, on_exhausted="drop"), taken=15),
    "mixture-feedback": Kind(
        mixture, prepare=lambda loader, _: loader.feedback([Fraction(1, 3), Fraction(1, 2), Fraction(1, 6)])
    ),
    # ------------------------------------------------------------------------------------------- packed rows
    "packed-stream": Kind(lambda _: PackedLoader(DataLoader(SequenceStream(), **JOINED))),
    "packed-fixed-streams": Kind(
        lambda folder: PackedLoader(
            DataLoader(dataset_of(folder, "jsonl", streams=2, shuffle_buffer=4), seed=8, decode=sequence_of, **JOINED)
        )
    ),
    # ------------------------------------------------------------------------------------------- DataLoader2
    "dataloader2": Kind(lambda _: graph(None, shuffle=5), later=False),
    "dataloader2-in-process": Kind(lambda _: graph(InProcessReadingService(), shuffle=5)),
    "dataloader2-sequential": Kind(
        lambda _: graph(SequentialReadingService(InProcessReadingService(), InProcessReadingService()), prefetch=3)
    ),
    "dataloader2-workers": Kind(
        lambda _: graph(MultiProcessingReadingService(num_workers=2, multiprocessing_context="fork"), shuffle=5)
    ),
}
