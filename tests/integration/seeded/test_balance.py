"""`balance=`: the ranks divide each global batch by cost, and what it consists of depends on nothing but the seed."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset, DistributedSampler

from asyncloader import Balance, BucketBatchSampler, DataLoader, MixtureSampler, RemoteIterableDataset, sample_rng

LENGTHS = np.random.default_rng(0).lognormal(4, 0.8, 410).astype(int).clip(1, 500)


class Drawing(Dataset[Any]):
    """Samples of their index and of a random number of the sample's own."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        return index, int(sample_rng().numpy.integers(1 << 40))


class AwaitedDrawing(Drawing):
    """The same, awaited."""

    async def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class Failing(Drawing):
    """Every tenth sample raises."""

    def __getitem__(self, index: int) -> Any:
        if index % 10 == 0:
            raise ValueError(f"bad sample {index}")
        return super().__getitem__(index)


def samples(batch: Any) -> list[Any]:
    return list(zip(*(each.tolist() for each in batch), strict=True))


def run(
    ranks: int, kind: type[Dataset[Any]] = Drawing, state: Any = None, stop: int | None = None, **options: Any
) -> Any:
    """The global batches of a run, each sorted; the ranks' own batches; and the state after the last of them."""
    steps, states = [], []
    given: dict[str, Any] = {"shuffle": True, "balance": Balance(LENGTHS)} | options
    for rank in range(ranks):
        own = copy.deepcopy(given)
        with DataLoader[Any](kind(), 64 // ranks, seed=3, rank=rank, world_size=ranks, **own) as loader:
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            steps.append([samples(batch) for _, batch in zip(range(stop or 100), iterator, strict=False)])
            states.append(loader.state_dict())
            del iterator
    assert all(each == states[0] for each in states)
    batches = list(zip(*steps, strict=True))
    return [sorted(itertools.chain.from_iterable(step)) for step in batches], batches, states[0]


WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "workers": "threads"},
}


@pytest.mark.parametrize("kind", [Drawing, AwaitedDrawing])
@pytest.mark.parametrize("workers", WORKERS)
def test_a_run_goes_on_with_more_ranks(workers: str, kind: type[Dataset[Any]]) -> None:
    """Saved under two ranks and resumed under four: the samples of each step, and their random numbers, are those of a
    single process without `balance`; and the ranks' sums of squares are equal in all full steps.
    """
    whole, *_ = run(1, kind, balance=None)
    assert len({index for step in whole for index, *_ in step}) == len(LENGTHS)
    before, first, state = run(2, kind, stop=3, **WORKERS[workers])
    after, second, _ = run(4, kind, state, **WORKERS[workers])
    last = len(LENGTHS) % 64 // 4 * 4
    assert before + after[:-1] == whole[:-1]
    assert set(after[-1]) <= set(whole[-1])
    assert len(after[-1]) == last
    for step in first + second[:-1]:
        sums = [sum(int(LENGTHS[index]) ** 2 for index, *_ in batch) for batch in step]
        assert len({len(batch) for batch in step}) == 1
        assert max(sums) <= 1.02 * sum(sums) / len(sums)


@pytest.mark.parametrize("rule", ["drop", "repeat", "pad"])
def test_the_end_of_an_epoch_is_that_without_balance(rule: Any) -> None:
    """The last, incomplete global batch has the samples, as often, that it has in the order of the samples."""
    sampler = MixtureSampler([range(300), range(110)], [3, 1], seed=2, on_exhausted="drop")
    mixture: dict[str, Any] = {"shuffle": None, "sampler": sampler}
    for order in ({}, mixture):
        plain, *_ = run(4, balance=None, on_uneven=rule, **order)
        dealt, *_ = run(4, on_uneven=rule, **order)
        assert [[index for index, *_ in step] for step in dealt] == [[index for index, *_ in step] for step in plain]


def test_bad_samples_are_replaced_as_without_balance() -> None:
    """The substitutes follow from the positions, which samples keep."""
    plain, *_ = run(2, Failing, balance=None, on_error="refill")
    dealt, *_ = run(2, Failing, on_error="refill")
    assert dealt == plain


@pytest.mark.parametrize("rule", ["drop", "pad"])
def test_single_steps(rule: Any) -> None:
    """A batch is made alone, as the ranks have it."""
    _, batches, _ = run(4, on_uneven=rule)
    options: dict[str, Any] = {"seed": 3, "shuffle": True, "balance": Balance(LENGTHS), "on_uneven": rule}
    with DataLoader[Any](Drawing(), 16, rank=1, world_size=4, **options) as loader:
        for step in (0, 3, 6):
            assert [samples(loader.batch_at(step, rank=rank)) for rank in range(4)] == list(batches[step])


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (Drawing(), {"seed": None}, "needs seed="),
        (Drawing(), {"batch_size": None}, "single samples"),
        (Drawing(), {"batch_sampler": BucketBatchSampler(LENGTHS, 8, seed=5)}, "needs batch_size=.*ranks="),
        (Drawing(), {"balance": LENGTHS}, "a Balance or None"),
        (Drawing(), {"balance": Balance(LENGTHS[1:])}, "409 lengths, but the dataset has 410 samples"),
        (RemoteIterableDataset(["a.tar"], streams=2), {}, "needs a map dataset"),
        (RemoteIterableDataset(["a.tar"]), {}, "needs a map dataset"),
    ],
)
def test_it_is_refused_where_it_cannot_be(dataset: Any, options: dict[str, Any], text: str) -> None:
    """The error says what is missing."""
    given: dict[str, Any] = {"seed": 1, "balance": Balance(LENGTHS)} | options
    with pytest.raises(ValueError, match=text):
        DataLoader[Any](dataset, **given)


def test_a_sampler_that_shards_by_itself_is_refused() -> None:
    """The other ranks' samples are unknown."""
    sampler: Any = DistributedSampler(Drawing(), num_replicas=2, rank=0)
    with (
        DataLoader[Any](Drawing(), 4, sampler=sampler, seed=1, balance=Balance(LENGTHS)) as loader,
        pytest.raises(ValueError, match="DistributedSampler gives only this rank's part"),
    ):
        iter(loader)
