"""Length-aware batches: every sample once, an equal plan in every process, and any batch found directly."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import Sampler

from asyncloader import DataLoader
from asyncloader.samplers.by_length import BucketBatchSampler, TokenBudgetBatchSampler
from tests.unit.samplers.length_samplers import AnySampler, buckets, budgets, joined, some_lengths

# ---------------------------------------------------------------------------------------------- both samplers


@settings(deadline=None)
@given(buckets() | budgets())
def test_the_rest_of_an_epoch_from_any_batch(sampler: AnySampler) -> None:
    """`iter_from(k)` is the epoch without its first k batches, and `len` their number; so also in a fresh copy."""
    batches = list(sampler)
    assert len(sampler) == len(batches)
    for start in range(len(batches) + 1):
        assert list(sampler.iter_from(start)) == batches[start:]
        fresh = pickle.loads(pickle.dumps(sampler))
        fresh._planned = None
        assert list(fresh.iter_from(start)) == batches[start:]
    fresh = pickle.loads(pickle.dumps(sampler))
    fresh._planned = None
    assert len(fresh) == len(batches)


@settings(deadline=None)
@given(buckets() | budgets())
def test_start_out_of_range(sampler: AnySampler) -> None:
    """A bad start is refused at once, not at the first batch."""
    for start in (-1, len(sampler) + 1):
        with pytest.raises(ValueError, match=f"between 0 and {len(sampler)}, but got start={start}"):
            sampler.iter_from(start)


MAKERS: list[Callable[..., AnySampler]] = [
    lambda lengths, seed=1, **options: BucketBatchSampler(lengths, 10, seed, **options),
    lambda lengths, seed=1, **options: TokenBudgetBatchSampler(lengths, 2000, seed, **options),
    lambda lengths, seed=1, **options: TokenBudgetBatchSampler(lengths, 2000, seed, padding=False, **options),
]
BOTH = pytest.mark.parametrize("make", MAKERS, ids=["bucket", "budget", "budget without padding"])


@BOTH
def test_batches_are_a_function_of_seed_and_epoch(make: Callable[..., AnySampler]) -> None:
    """Separate objects agree, whatever the global generators do and whatever was iterated before; epochs differ."""
    lengths = some_lengths(2000)
    one, other = make(lengths), make(torch.tensor(lengths))
    state = torch.get_rng_state()
    first = list(one)
    one.set_epoch(1)
    second = list(one)
    one.set_epoch(0)
    torch.manual_seed(3)
    assert list(one) == first == list(other) == list(make(lengths.tolist()))
    assert second != first
    assert sorted(joined(second)) == sorted(joined(first))
    assert list(make(lengths, seed=2)) != first
    torch.set_rng_state(state)
    assert all(type(index) is int for index in joined(first))


@BOTH
def test_samples_of_a_batch_are_alike_and_batches_are_not(make: Callable[..., AnySampler]) -> None:
    """A batch has similar lengths, the longest first; batches have different lengths. Unpadded, none is sorted."""
    lengths = some_lengths(5000)
    sampler = make(lengths, window=5000)
    batches = list(sampler)
    longest = np.array([lengths[batch].max() for batch in batches])
    assert abs(np.corrcoef(np.arange(len(longest)), longest)[0, 1]) < 5 / np.sqrt(len(longest))
    if isinstance(sampler, BucketBatchSampler) or sampler._limits.padding:
        assert all((np.diff(lengths[batch]) <= 0).all() for batch in batches)
    else:
        assert np.mean([lengths[batch].std() for batch in batches]) > 0.5 * lengths.std()


@BOTH
def test_they_are_samplers_of_torch(make: Callable[..., AnySampler]) -> None:
    """The samplers are of torch's class, pickle with their epoch, and serve torch's loader and ours."""
    lengths = some_lengths(100)
    sampler = make(lengths)
    sampler.set_epoch(2)
    assert isinstance(sampler, Sampler)
    expected = list(sampler)
    copy = pickle.loads(pickle.dumps(sampler))
    assert list(copy) == expected
    assert repr(copy) == repr(sampler)
    assert f"{type(sampler).__name__} of 100" in repr(sampler)
    data: Any = list(range(100))
    assert [batch.tolist() for batch in torch.utils.data.DataLoader(data, batch_sampler=sampler)] == expected
    with DataLoader[Any](data, batch_sampler=sampler, num_workers=2) as loader:
        assert len(loader) == len(expected)
        assert [batch.tolist() for batch in loader] == expected


@BOTH
@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([3, 4, 0, 5], ValueError, "lengths should be positive, but sample 2 has length 0"),
        ([3, -4, 0, 5], ValueError, "lengths should be positive, but sample 1 has length -4"),
        ([3.5], TypeError, "lengths should be integers, but got float64"),
        ([True], TypeError, "lengths should be integers, but got bool"),
        ([[1, 2]], ValueError, r"one length a sample, but got shape \(1, 2\)"),
    ],
)
def test_lengths_out_of_range(
    make: Callable[..., AnySampler], lengths: Any, error: type[Exception], message: str
) -> None:
    """Bad lengths are refused; the error has the index and the value."""
    with pytest.raises(error, match=message):
        make(lengths)


@BOTH
def test_options_out_of_range(make: Callable[..., AnySampler]) -> None:
    """Bad options are refused; the error has the value."""
    with pytest.raises(ValueError, match="window should be positive, but got window=0"):
        make([1], window=0)
    with pytest.raises(ValueError, match="seed=-1"):
        make([1], seed=-1)
    with pytest.raises(ValueError, match=f"epoch={2**64}"):
        make([1]).set_epoch(2**64)


def test_sizes_may_be_numbers_of_numpy() -> None:
    """Sizes of numpy's narrow types, in which products would overflow, give the same batches as Python's."""
    two: Any = np.int8(2)
    budget: Any = np.int16(1 << 14)
    lengths = [5] * 1000
    assert list(BucketBatchSampler(lengths, two, 0, ranks=two)) == list(BucketBatchSampler(lengths, 2, 0, ranks=2))
    assert TokenBudgetBatchSampler(lengths, budget, 0).window == (1 << 14) // 5 * 100


# ------------------------------------------------------------------------------------------------------- buckets


@settings(deadline=None)
@given(buckets())
def test_buckets_hold_every_sample_once(sampler: BucketBatchSampler) -> None:
    """All batches are of one size, except that the last may be smaller unless it is dropped."""
    batches = list(sampler)
    size, rest = sampler.batch_size, len(sampler._lengths) % sampler.batch_size
    assert all(len(batch) == size for batch in batches[:-1])
    found = Counter(joined(batches))
    assert set(found.values()) <= {1}
    if sampler.drop_last:
        assert all(len(batch) == size for batch in batches)
        assert len(found) == len(sampler._lengths) - rest
    else:
        assert sorted(found) == list(range(len(sampler._lengths)))
        assert not batches or len(batches[-1]) == (rest or size)
