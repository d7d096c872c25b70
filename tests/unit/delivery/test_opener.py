from __future__ import annotations

import gc
import os
import warnings

import pytest
import torch
from torch._utils import ExceptionWrapper

from asyncloader.delivery.opener import _MOST_ONEOFFS, Opener, raise_worker_error
from asyncloader.errors import RingMemoryError
from asyncloader.telemetry.statistics import Statistics
from asyncloader.workers.inbox import Answer
from asyncloader.workers.ipc.ring import Ring
from tests.delivery import answers


def new_ring() -> Ring:
    return answers.new_ring(slots=3, credits=2)


def answer(ring: Ring | None, value: object, *, pickled: int = 0) -> Answer:
    """The pool's answer for a batch: in a slot, in a segment of its own (without a ring), or without bytes."""
    return answers.answer(0, ring, value, pickled=pickled)


def test_a_view_while_the_ring_can_spare_it() -> None:
    """The first batch is a view of its slot, which is released when the batch is freed."""
    ring, statistics = new_ring(), Statistics()
    batch = Opener(statistics).open(answer(ring, torch.arange(5)))
    assert (ring.leased, statistics.ring_copies) == (1, 0)
    assert batch.tolist() == [0, 1, 2, 3, 4]
    del batch
    assert ring.idle


def test_a_copy_when_the_ring_cannot_spare_it() -> None:
    """A batch beyond the number that may be lent is a private copy, is counted, and its slot is free at once."""
    ring, statistics = new_ring(), Statistics()
    opener = Opener(statistics)
    held = opener.open(answer(ring, torch.zeros(5)))
    second = answer(ring, torch.ones(5))
    assert Opener(Statistics()).will_copy(second)
    copy = opener.open(second)
    assert (ring.leased, len(ring._free), statistics.ring_copies) == (1, 2, 1)
    for _ in range(2):  # each free slot is written again
        assert opener.open(answer(ring, torch.full((5,), 9.0))).tolist() == [9.0] * 5
    assert (held.tolist(), copy.tolist()) == ([0.0] * 5, [1.0] * 5)


def test_a_segment_of_its_own_needs_no_copy() -> None:
    """A one-off batch is a view of its own memory, and its descriptor is closed."""
    statistics = Statistics()
    item = answer(None, torch.arange(4))
    assert not Opener(Statistics()).will_copy(item)
    batch = Opener(statistics).open(item)
    assert item.fd is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(item.fd)
    assert (batch.tolist(), statistics.ring_copies) == ([0, 1, 2, 3], 0)


def test_segments_that_a_consumer_hoards_are_bounded() -> None:
    """Each held one-off batch costs a mapping, so beyond a limit batches are copied until held ones are dropped."""
    statistics = Statistics()
    opener = Opener(statistics)
    held = [opener.open(answer(None, torch.zeros(4))) for _ in range(_MOST_ONEOFFS)]
    assert statistics.ring_copies == 0
    item = answer(None, torch.ones(4))
    assert opener.will_copy(item)
    assert opener.open(item).tolist() == [1.0] * 4
    assert statistics.ring_copies == 1
    held.pop()
    held.append(opener.open(answer(None, torch.zeros(4))))
    assert statistics.ring_copies == 1
    assert all(batch.tolist() == [0.0] * 4 for batch in held)


def test_discarding_gives_back_slot_and_descriptor() -> None:
    """A discarded batch leaves nothing behind (the leak check verifies that)."""
    ring = new_ring()
    answer(ring, torch.zeros(3)).discard()
    answer(None, torch.zeros(3)).discard()
    answer(None, "nothing").discard()
    assert ring.idle


def test_large_pickles_are_warned_about_once() -> None:
    """Megabytes of Python objects are warned about once per iterator, with advice."""
    opener = Opener(Statistics())
    with pytest.warns(UserWarning, match=r"2,000,000 bytes of Python objects.*tensors or numpy arrays"):
        opener.open(answer(None, "x", pickled=2_000_000))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opener.open(answer(None, "x", pickled=2_000_000))
        Opener(Statistics()).open(answer(None, "x", pickled=10_000))


def test_a_copy_of_a_batch_that_cannot_be_built_frees_its_slot() -> None:
    """A slot is freed if an object of the batch cannot be unpickled in the main process."""
    ring = new_ring()
    opener = Opener(Statistics())
    held = opener.open(answer(ring, torch.zeros(5)))
    for _ in range(4):
        item = answer(ring, [torch.zeros(5), Broken()])
        assert Opener(Statistics()).will_copy(item)
        with pytest.raises(KeyError, match="broken"):
            opener.open(item)
        del item
    del held
    gc.collect()
    assert ring.idle


class Broken:
    def __reduce__(self) -> tuple[object, ...]:
        return _break, ()


def _break() -> None:
    raise KeyError("broken")


def test_worker_errors_are_raised_as_they_were() -> None:
    """A user's error keeps its type and says where it was raised; one of our own errors is raised unchanged."""
    try:
        raise KeyError("missing")
    except KeyError as error:
        wrapper = ExceptionWrapper(
            exc_info=(KeyError, error, error.__traceback__), where="in DataLoader worker process 3"
        )
    with pytest.raises(KeyError, match="DataLoader worker process 3"):
        raise_worker_error(wrapper)
    ours = RingMemoryError(1, 2, "why")
    with pytest.raises(RingMemoryError) as caught:
        raise_worker_error(ours)
    assert caught.value is ours
