"""Iterable datasets: uneven lengths, short batches, worker information and the length that a dataset claims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from asyncloader import AsyncDataLoader, DataLoader
from tests.helpers.datasets import UnevenStream
from tests.helpers.running import BOTH, KINDS, assert_like_torch, collect

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

UNEVEN: dict[str, list[int]] = {
    "even": [8, 8, 8],
    "first ends early": [1, 9, 20],
    "last ends early": [20, 9, 0],
    "one has all": [0, 0, 11],
    "nothing": [0, 0, 0],
    "just full": [4, 8, 12],
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("drop_last", [False, True])
def test_uneven_streams(kind: str, name: str, drop_last: bool) -> None:
    """Workers whose copies end at different times, or have no sample: torch's batches in torch's order; short batches
    are delivered or dropped.
    """
    assert_like_torch(kind, UnevenStream(UNEVEN[name]), num_workers=3, batch_size=4, drop_last=drop_last)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0, "batch_size": 4},
        {"num_workers": 0, "batch_size": 4, "drop_last": True},
        {"num_workers": 0, "batch_size": None},
        {"num_workers": 2, "batch_size": 4, "drop_last": True},
        {"num_workers": 2, "batch_size": None},
        {"num_workers": 2, "batch_size": 4, "prefetch_factor": 7},
        {"num_workers": 1, "batch_size": 100},
    ],
    ids=str,
)
def test_options_for_streams(kind: str, options: dict[str, Any]) -> None:
    """drop_last counts per worker; batch_size=None gives single samples; all as in torch."""
    assert_like_torch(kind, UnevenStream([10, 7]), **options)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("persistent", [False, True])
def test_streams_begin_anew_each_epoch(kind: str, persistent: bool) -> None:
    """Each epoch iterates the dataset again, with torch's worker seeds."""
    assert_like_torch(kind, UnevenStream([3, 14]), epochs=3, num_workers=2, batch_size=4, persistent_workers=persistent)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_out_of_order(kind: str) -> None:
    """With in_order=False every sample of every worker is delivered once."""
    batches = collect(kind, UnevenStream([3, 30, 11]), num_workers=3, batch_size=4, in_order=False)
    pairs = sorted(tuple(pair.tolist()) for batch in batches for pair in batch[0])
    assert pairs == [(w, i) for w, n in enumerate([3, 30, 11]) for i in range(n)]


@pytest.mark.parametrize("kind", BOTH)
def test_chained_streams(kind: str) -> None:
    """torch's ChainDataset works unchanged."""
    assert_like_torch(kind, ChainDataset([UnevenStream([2, 5]), UnevenStream([3, 0])]), num_workers=2, batch_size=2)


class Sharded(IterableDataset[Any]):
    """Splits a range by `get_worker_info`, and gives its values."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        for i in range(info.id, 10, info.num_workers):
            yield i, info.id, info.num_workers, info.seed


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "method"), [("sync", "fork"), ("sync", "spawn"), ("asyncio", "fork")])
def test_worker_info(kind: str, method: str) -> None:
    """`get_worker_info` has the worker's number, the number of workers, the seed and the worker's dataset."""
    assert get_worker_info() is None
    run = assert_like_torch(
        kind, Sharded(), num_workers=2, batch_size=None, collate_fn=list, multiprocessing_context=method
    )
    assert sorted(sample[0] for sample in run.epochs[0]) == list(range(10))
    seeds = {sample[1]: sample[3] for sample in run.epochs[0]}
    assert seeds[1] == seeds[0] + 1


@pytest.mark.parametrize("kind", BOTH)
def test_unknown_length(kind: str) -> None:
    """For a stream without a length `len(loader)` is a TypeError, as in torch."""
    make = DataLoader if kind == "sync" else AsyncDataLoader
    for loader in (torch.utils.data.DataLoader(UnevenStream([3])), make(UnevenStream([3]))):
        with pytest.raises(TypeError, match="has no len"):
            len(loader)
