"""The queue of `for` loses no item and no wake-up, whenever they come."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from asyncloader.epoch.ready_queue import BlockingQueue
from tests.helpers.interrupting import Interrupt, unnoticed_signal

ROUNDS = 5_000


@pytest.fixture
def many_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("many_switches")
def test_every_item_wakes_the_consumer() -> None:
    """Each item comes while the consumer begins to wait, and is the last until it was taken: no other wakes it."""
    ready, taken = BlockingQueue(), queue.SimpleQueue[Any]()

    def produce() -> None:
        for number in range(ROUNDS):
            item: Any = number
            ready.put(item)
            assert taken.get(timeout=30) == number

    thread = threading.Thread(target=produce)
    thread.start()
    for _ in range(ROUNDS):
        while not ready:
            ready.wait(30)
        taken.put(ready.popleft())
    thread.join()


def test_a_wait_ends() -> None:
    """It ends at once where there is an item, and with an error where none comes in time; then the next wait works."""
    ready = BlockingQueue()
    with pytest.raises(queue.Empty):
        ready.wait(0.01)
    ready.put(None)
    ready.wait(0)
    assert ready.popleft() is None
    thread = threading.Thread(target=ready.put, args=(None,))
    thread.start()
    while not ready:
        ready.wait(30)
    thread.join()
    ready.discard()
    assert not ready


def test_a_signal_ends_a_wait_that_it_does_not_interrupt() -> None:
    """One that comes just before the wait."""
    ready = BlockingQueue()
    with unnoticed_signal(lambda: ready._waiting), pytest.raises(Interrupt):
        ready.wait(None)
    assert not ready._waiting
