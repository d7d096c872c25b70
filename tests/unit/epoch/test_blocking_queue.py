"""The queue of `for` loses no item and no wake-up, whenever they come."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from asyncloader.epoch.blocking_queue import BlockingQueue

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


class Interrupt(Exception):
    """Raised by the signal's handler, as Ctrl-C raises KeyboardInterrupt."""


def test_a_signal_ends_a_wait_that_it_does_not_interrupt() -> None:
    """The system gives it to another thread here. So it is if it comes just before the wait begins."""
    ready = BlockingQueue()

    def interrupt(*_: object) -> None:
        raise Interrupt

    def send() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        while not ready._waiting:
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    handler = signal.signal(signal.SIGUSR1, interrupt)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(Interrupt):
            ready.wait(None)
    finally:
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGUSR1, handler)
    assert not ready._waiting
