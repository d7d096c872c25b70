"""The options that are objects: checked when they are constructed, changed by their fields."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from asyncloader import (
    AsyncDataLoader,
    DataLoader,
    DeviceOptions,
    Recovery,
    StatefulDataLoader,
    Tuning,
)
from asyncloader.options.epoch_config import EpochConfig
from tests.helpers.datasets import Numbers

ROWS = Numbers(3)


def test_they_are_fixed_and_can_be_copied() -> None:
    """The objects are frozen, equal by their fields, and picklable; the repr shows the fields that are not defaults."""
    given = Recovery(worker_timeout=5, worker_memory_limit="8GiB")
    assert repr(given) == "Recovery(worker_timeout=5, worker_memory_limit='8GiB')"
    assert repr(Tuning()) == "Tuning()"
    assert pickle.loads(pickle.dumps(given)) == given
    with pytest.raises(dataclasses.FrozenInstanceError):
        given.worker_timeout = 6  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Recovery(worker_timeout=-1), "worker_timeout=-1"),
        (lambda: Tuning(ring_bytes="much"), "ring_bytes='much'"),
        (lambda: Tuning(reorder_window=-1), "reorder_window=-1"),
        (lambda: DeviceOptions(device_prefetch=0), "device_prefetch=0"),
    ],
)
def test_they_are_checked_where_they_are_made(make: Any, words: str) -> None:
    """The error is raised at the line with the mistake: where the object is constructed."""
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("kind", [DataLoader, AsyncDataLoader])
def test_clone_changes_single_fields(kind: Any) -> None:
    """The object's other fields stay; an object and a field of it may be given together."""
    given = Recovery(worker_timeout=5, max_skipped_samples=None)
    loader = kind(Numbers(3), num_workers=1, recovery=given, on_error="skip")
    clone = loader.clone(worker_timeout=7, ring_bytes="1MiB")
    assert clone.recovery == Recovery(worker_timeout=7, max_skipped_samples=None)
    assert clone.tuning == Tuning(ring_bytes="1MiB")
    assert loader.recovery.worker_timeout == 5
    both = loader.clone(recovery=Recovery(allow_replay=True), worker_timeout=9).recovery
    assert both == Recovery(allow_replay=True, worker_timeout=9)
    assert kind.from_torch(DataLoader(Numbers(3)), reorder_window=2).tuning == Tuning(reorder_window=2)


def test_sizes_are_resolved_when_iteration_begins() -> None:
    """The object keeps the text; the epoch's options have the number of bytes."""
    given: dict[str, Any] = {"tuning": Tuning(ring_bytes="2MiB"), "recovery": Recovery(worker_memory_limit="1GB")}
    config = EpochConfig.of(DataLoader(Numbers(3), num_workers=1, **given))
    assert (config.ring_bytes, config.worker_memory_limit) == (2 << 20, 10**9)


@pytest.mark.parametrize(
    ("call", "name", "instead"),
    [
        (partial(DataLoader, ROWS), "persistent_worker", ". Did you mean 'persistent_workers'?"),
        (DataLoader(ROWS).clone, "batchsize", ". Did you mean 'batch_size'?"),
        (partial(DataLoader, ROWS), "num_replicas", ". Did you mean 'world_size'?"),
        (
            partial(AsyncDataLoader, ROWS),
            "worker_timeout",
            ": it is a field of Recovery, so write recovery=Recovery(worker_timeout=...)",
        ),
        (
            partial(AsyncDataLoader, ROWS),
            "ring_byte",
            ": 'ring_bytes' is a field of Tuning, so write tuning=Tuning(ring_bytes=...)",
        ),
        (Tuning, "worker_timeout", ": it is a field of Recovery, so write recovery=Recovery(worker_timeout=...)"),
        (Recovery, "worker_timeouts", ". Did you mean 'worker_timeout'?"),
        (partial(StatefulDataLoader, ROWS), "seed", ""),
        (partial(DataLoader, ROWS), "nothing_like_it", ""),
    ],
)
def test_names_that_are_no_options(call: Callable[..., Any], name: str, instead: str) -> None:
    """Are refused in Python's words, with the right spelling and place."""
    with pytest.raises(
        TypeError, match=rf"__init__\(\) got an unexpected keyword argument '{name}'{re.escape(instead)}$"
    ):
        call(**{name: 4})
