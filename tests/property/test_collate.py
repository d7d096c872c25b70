from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils.data import default_collate
from torch.utils.data._utils import worker as torch_worker

from asyncloader.workers.fetch.setup import install_worker_info
from asyncloader.workers.ipc.codec import Encoder
from asyncloader.workers.ipc.collate import Collator
from tests.drawn import scaled
from tests.helpers.comparing import assert_same
from tests.property.samples import batches, single_leaves
from tests.unit.workers.ipc.through_memory import view


@pytest.fixture(autouse=True)
def in_a_worker() -> Iterator[None]:
    """torch's collation depends on it: in a worker it stacks into shared memory, with the first sample's dtype."""
    install_worker_info(0, 1, 0, None)
    yield
    torch_worker._worker_info = None


def outcome(collate: Any, samples: list[Any]) -> tuple[Any, Exception | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of torch's, on read-only arrays and the like
        try:
            return collate(samples), None
        except Exception as error:
            return None, error


def words(error: Exception | None) -> tuple[type, str]:
    return type(error), str(error)


def ours(samples: list[Any]) -> Any:
    return view(Collator(Encoder()).collate(samples))


def check(samples: list[Any]) -> tuple[Exception | None, Exception | None]:
    """Check that both give equal batches, or both an error. Returns our error and torch's."""
    expected, refused = outcome(default_collate, samples)
    got, error = outcome(ours, samples)
    if refused is None:
        assert error is None, repr(error)
        assert_same(got, expected)
    else:
        assert error is not None, refused
    return error, refused


@settings(max_examples=scaled(250), deadline=None)
@given(batches())
def test_collation_into_the_slot_is_torchs(samples: list[Any]) -> None:
    """For any structure of samples it gives torch's values, dtypes and types, and refuses what torch refuses."""
    check(samples)


@settings(max_examples=scaled(150), deadline=None)
@given(single_leaves())
def test_errors_are_torchs(samples: list[Any]) -> None:
    """A fault raises torch's type with torch's words, of a worker or the clearer words of the main process. (Of several
    faults in one batch another may be found first.)
    """
    error, refused = check(samples)
    torch_worker._worker_info = None
    _, in_main = outcome(default_collate, samples)
    install_worker_info(0, 1, 0, None)
    assert words(error) in (words(refused), words(in_main))


@settings(max_examples=scaled(60), deadline=None)
@given(batches(), batches())
def test_a_refused_batch_leaves_nothing_behind(first: list[Any], second: list[Any]) -> None:
    """One encoder serves one batch after the other, whether or not earlier batches were refused."""
    encoder = Encoder()
    outcome(lambda samples: view(Collator(encoder).collate(samples)), first)
    fresh, refused = outcome(ours, second)
    got, error = outcome(lambda samples: view(Collator(encoder).collate(samples)), second)
    assert type(error) is type(refused)
    assert_same(got, fresh)


def test_the_comparison_bites() -> None:
    """Another dtype of the same values is a difference."""
    with pytest.raises(AssertionError):
        assert_same(ours([1, 2]), torch.tensor([1.0, 2.0]))


class Key(str):
    """A key that is equal to a plain string."""

    __slots__ = ()


NEARLY_EQUAL: list[list[Any]] = [
    [{"x": 1, "y": 2}] * 2,
    [{"y": 1, "x": 2}] * 2,
    [{"x": 1.0, "y": 2}] * 2,
    [{"x": 1, "y": 2}] * 3,
    [{"x": 1, Key("y"): 2}] * 2,
    [{Key("x"): 1, "y": 2}] * 2,
    [{"x": 1, "y": "2"}] * 2,
    [{"x": torch.ones(1), "y": 2}] * 2,
    [{"x": 1}] * 2,
    [{"x": np.ones(2, np.float32), "y": np.ones(2, np.float32)}] * 2,
    [{"x": np.ones((1, 2), np.float32), "y": np.ones(2, np.float32)}] * 2,
    [{"x": np.ones((2, 2), np.float32)[:, 0], "y": np.ones(2, np.float32)}] * 2,
    [(1, 2)] * 2,
    [[1, 2]] * 2,
    [(1, 2.0)] * 2,
    [(1, 2, 3)] * 2,
    [((1, 2),)] * 2,
    [{"x": {"x": 1}, "y": 2}] * 2,
    [1, 2],
    [True, False],
    [1.0, 2],
    [{"x": 1, "y": 2}, OrderedDict(y=1, x=2)],
    [b"ab", b"cd"],
]


def test_a_batch_is_not_taken_for_the_one_before() -> None:
    """The encoder remembers the structure and the template of its newest batch: each batch of many comes out as if it
    was the first, also after one from which it hardly differs.
    """
    for first, second in product(NEARLY_EQUAL, repeat=2):
        collator = Collator(Encoder())
        for samples in (first, second, first):
            got = view(collator.collate(samples))
            assert_same(got, ours(samples))
            assert_same(got, default_collate(samples))
            if isinstance(got, dict):
                assert [*map(type, got)] == [*map(type, samples[0])]
