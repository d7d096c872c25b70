"""Helpers for the tests of length-aware batches: samplers with any options, and lengths like those of texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from asyncloader.samplers.by_length import BucketBatchSampler, TokenBudgetBatchSampler

AnySampler = BucketBatchSampler | TokenBudgetBatchSampler

LENGTHS = st.lists(st.integers(1, 40), max_size=120)
SEEDS = st.integers(0, 2**64 - 1)
WINDOWS = st.none() | st.integers(1, 130)


@st.composite
def buckets(draw: st.DrawFn) -> BucketBatchSampler:
    sampler = BucketBatchSampler(
        draw(LENGTHS),
        draw(st.integers(1, 12)),
        draw(SEEDS),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        window=draw(WINDOWS),
    )
    sampler.set_epoch(draw(SEEDS))
    return sampler


@st.composite
def budgets(draw: st.DrawFn) -> TokenBudgetBatchSampler:
    sampler = TokenBudgetBatchSampler(
        draw(LENGTHS),
        draw(st.integers(1, 100)),
        draw(SEEDS),
        padding=draw(st.booleans()),
        pad_to=draw(st.sampled_from([1, 1, 8])),
        max_batch_size=draw(st.none() | st.integers(1, 12)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        window=draw(WINDOWS),
        on_too_long="skip",
    )
    sampler.set_epoch(draw(SEEDS))
    return sampler


def joined(batches: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(batches))


def padded(lengths: npt.NDArray[np.int64], batches: Iterable[list[int]]) -> int:
    return sum(int(lengths[batch].max()) * len(batch) for batch in batches)


def some_lengths(size: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Lengths distributed as those of texts: most are short, and a few are long."""
    drawn = np.random.default_rng(seed).lognormal(4, 0.8, size)
    return np.clip(drawn, 1, 1000).astype(np.int64)
