"""Within an epoch a state fits samplers with the same arguments only: with others its position is another sample's."""

from __future__ import annotations

import inspect
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from asyncloader import (
    BucketBatchSampler,
    DataLoader,
    MixtureSampler,
    PackingSampler,
    SequenceRows,
    StateError,
    TokenBudgetBatchSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LENGTHS = [3, 5, 2, 7, 1, 4, 6, 2, 8, 3] * 5
LONG = [*LENGTHS[:-1], 9]

# Each sampler's arguments, and of each argument another value.
SAMPLERS: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {
    BucketBatchSampler: (
        {"lengths": LENGTHS, "batch_size": 4, "seed": 1},
        {
            "lengths": LONG,
            "batch_size": 5,
            "seed": 2,
            "shuffle": False,
            "drop_last": True,
            "window": 8,
            "ranks": 2,
        },
    ),
    TokenBudgetBatchSampler: (
        {"lengths": LENGTHS, "max_tokens": 16, "seed": 1},
        {
            "lengths": LONG,
            "max_tokens": 17,
            "seed": 2,
            "padding": False,
            "pad_to": 2,
            "max_batch_size": 3,
            "shuffle": False,
            "drop_last": True,
            "window": 12,
            "ranks": 2,
            "on_too_long": "skip",
        },
    ),
    PackingSampler: (
        {"lengths": LENGTHS, "max_tokens": 16, "seed": 1},
        {
            "lengths": LONG,
            "max_tokens": 17,
            "seed": 2,
            "strategy": "wrap",
            "domains": [0, 1] * 25,
            "on_too_long": "split",
            "shuffle": False,
            "drop_last": True,
            "window": 12,
        },
    ),
    MixtureSampler: (
        {"datasets": [range(30), range(20)], "weights": [1, 2], "seed": 1, "num_samples": 60},
        {
            "datasets": [range(20), range(30)],
            "weights": [1, 3],
            "seed": 2,
            "num_samples": 61,
            "on_exhausted": "stop",
            "shuffle": False,
        },
    ),
}
TOLD: dict[Any, str] = {
    (PackingSampler, "lengths"): "lengths or domains",
    (PackingSampler, "domains"): "lengths or domains",
    (PackingSampler, "on_too_long"): "slices",
    (MixtureSampler, "datasets"): "lengths of datasets",
}
"""Arguments that the error names in another way."""

CASES = [(sampler, name) for sampler, (_, others) in SAMPLERS.items() for name in others]


def loader(sampler: Any, **options: Any) -> DataLoader[Any]:
    """A loader that reads by this sampler."""
    made = sampler(**options)
    dataset: Any = range(50)
    if sampler is PackingSampler:
        dataset = [[0] * length for length in LONG]
        return DataLoader(SequenceRows(dataset), sampler=made, batch_size=2, seed=3, collate_fn=list)
    by_batch = sampler is not MixtureSampler
    return DataLoader(dataset, seed=3, **{"batch_sampler" if by_batch else "sampler": made})


def test_all_arguments_are_tried() -> None:
    """None of them was forgotten."""
    for sampler, (_, others) in SAMPLERS.items():
        assert list(others) == [*inspect.signature(sampler).parameters]


@pytest.mark.parametrize(("sampler", "name"), CASES)
def test_another_argument(sampler: Any, name: str) -> None:
    """It is refused within an epoch, and named, unless the order is the same; at an epoch's end and beginning it is
    accepted. With the same arguments the epoch goes on where it was.
    """
    options, others = SAMPLERS[sampler]
    changed = options | {name: others[name]}
    if (sampler, name) == (MixtureSampler, "on_exhausted"):
        del changed["num_samples"]  # which needs the other
    with loader(sampler, **options) as before:
        whole = list(before)
        ended = before.state_dict()
        before.set_epoch(0)
        batches = iter(before)
        fresh = before.state_dict()
        assert str(next(batches)) == str(whole[0])
        within = before.state_dict()
    with loader(sampler, **options) as same:
        same.load_state_dict(within)
        assert str(list(same)) == str(whole[1:])
    with loader(sampler, **changed) as other:
        for state in (ended, fresh):
            other.load_state_dict(state)
        if (sampler, name) == (TokenBudgetBatchSampler, "on_too_long"):
            other.load_state_dict(within)  # no sample is too long
            assert str(list(other)) == str(whole[1:])
        else:
            with pytest.raises(StateError, match=rf"with {TOLD.get((sampler, name), name)}=.*another order"):
                other.load_state_dict(within)


SAME: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (
        sampler,
        options,
        {name: form(LENGTHS) if name == "lengths" else value for name, value in options.items()},
    )
    for sampler, (options, _) in SAMPLERS.items()
    if "lengths" in options
    for form in (partial(np.array, dtype=np.uint8), partial(np.array, dtype=">i4"), torch.tensor)
] + [
    (BucketBatchSampler, SAMPLERS[BucketBatchSampler][0], {"window": 400, "shuffle": np.True_, "drop_last": np.False_}),
    (TokenBudgetBatchSampler, SAMPLERS[TokenBudgetBatchSampler][0], {"padding": np.True_, "pad_to": np.int64(1)}),
    (PackingSampler, SAMPLERS[PackingSampler][0], {"domains": ["en"] * 50, "window": np.int64(1000), "shuffle": 1}),
    (MixtureSampler, {"datasets": [range(30), range(20)], "weights": [1, 2], "seed": 1}, {"num_samples": 50}),
    (MixtureSampler, SAMPLERS[MixtureSampler][0], {"weights": [0.5, 1.0], "shuffle": np.True_}),
]
"""Samplers, their arguments, and arguments from which the same order follows."""


@pytest.mark.parametrize(("sampler", "options", "changed"), SAME)
def test_other_words_for_the_same_order(sampler: Any, options: dict[str, Any], changed: dict[str, Any]) -> None:
    """They are accepted within an epoch, both ways; and a state has plain values, whatever the arguments' types."""
    for first, second in ((options, options | changed), (options | changed, options)):
        with loader(sampler, **first) as before:
            batches = iter(before)
            next(batches)
            state = json.loads(json.dumps(before.state_dict()))
            assert state == before.state_dict()
            rest = list(batches)
        with loader(sampler, **second) as later:
            later.load_state_dict(state)
            assert str(list(later)) == str(rest)
