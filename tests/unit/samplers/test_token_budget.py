"""Batches by tokens: the budget is kept, and it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from asyncloader.samplers.by_length import TokenBudgetBatchSampler
from tests.unit.samplers.length_samplers import budgets, joined, padded, some_lengths


@settings(deadline=None)
@given(budgets())
def test_budgets_hold_every_sample_once_and_are_kept(sampler: TokenBudgetBatchSampler) -> None:
    """No batch is empty or above a limit. Missing samples were too long, or in the last batch, if that is dropped."""
    limits, lengths = sampler._limits, sampler._lengths.astype(int)
    indices = range(len(lengths)) if sampler._kept is None else sampler._kept.tolist()
    costs = {index: -(-int(n) // limits.pad_to) * limits.pad_to for index, n in zip(indices, lengths, strict=True)}
    batches = list(sampler)
    for batch in batches:
        counted = [costs[index] for index in batch]
        assert 0 < (max(counted) * len(counted) if limits.padding else sum(counted)) <= sampler.max_tokens
        assert len(batch) <= (limits.max_batch_size or len(batch))
    sampler.drop_last = False
    whole = list(sampler)
    assert sorted(joined(whole)) == sorted(costs)
    assert whole[: len(batches)] == batches
    assert len(whole) - len(batches) in (0, 1)


def test_padding_and_its_multiple_are_counted() -> None:
    """Five samples of 3: 15 tokens; padded to multiples of 4, 20; beside a sample of 7, 7 each, unless only summed."""

    def sizes(lengths: list[int], max_tokens: int, **options: Any) -> list[int]:
        return [len(batch) for batch in TokenBudgetBatchSampler(lengths, max_tokens, 0, shuffle=False, **options)]

    assert sizes([3] * 5, 15) == [5]
    assert sizes([3] * 5, 15, pad_to=4) == [3, 2]
    assert sizes([3, 3, 7, 3], 15) == [2, 2]
    assert sizes([3, 3, 7, 3], 15, padding=False) == [3, 1]
    assert sizes([3] * 5, 15, max_batch_size=2) == [2, 2, 1]


def test_budgets_pad_little_and_are_filled() -> None:
    """By default at most 5 of 100 tokens are padding or missing; in random batches of these sizes, over 50."""
    lengths = some_lengths(20_000)
    batches = list(TokenBudgetBatchSampler(lengths, 4000, seed=1))
    assert int(lengths.sum()) > 0.95 * 4000 * len(batches)
    order = np.random.default_rng(0).permutation(20_000)
    at_random = [batch.tolist() for batch in np.array_split(order, len(batches))]
    assert padded(lengths, at_random) > 2 * int(lengths.sum())


def test_samples_that_are_too_long() -> None:
    """Samples above the budget raise an error that names the first of them, or are left out and counted."""
    lengths = [5, 9, 3, 12, 8]
    with pytest.raises(ValueError, match=r"sample 1 has length 9, which is more than max_tokens=8; 2 of 5 .* has 12"):
        TokenBudgetBatchSampler(lengths, 8, 0)
    with pytest.raises(ValueError, match=r"sample 1 has length 9 \(padded to a multiple of 4\), .* max_tokens=11"):
        TokenBudgetBatchSampler(lengths, 11, 0, pad_to=4)
    sampler = TokenBudgetBatchSampler(lengths, 8, 0, on_too_long="skip")
    assert sampler.skipped == 2
    assert sorted(joined(sampler)) == [0, 2, 4]
    assert TokenBudgetBatchSampler(lengths, 12, 0).skipped == 0
    assert list(TokenBudgetBatchSampler(lengths, 2, 0, on_too_long="skip")) == []


def test_budget_options_out_of_range() -> None:
    """Bad options are refused; the error has the value."""
    for name in ("max_tokens", "pad_to", "max_batch_size"):
        with pytest.raises(ValueError, match=f"{name} should be positive, but got {name}=0"):
            TokenBudgetBatchSampler([1], **{"max_tokens": 8, "seed": 0, name: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got on_too_long='cut'"):
        TokenBudgetBatchSampler([1], 8, 0, on_too_long="cut")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
