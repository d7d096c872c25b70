from __future__ import annotations

import threading
import weakref

import pytest

from asyncloader.delivery.device_stage import Releaser
from asyncloader.telemetry.counters import Recorder
from tests.delivery.fake import PATIENCE_S, FakeEvent, FakeMachine


class Source:
    """Stands for an object that holds a slot."""


def events(count: int) -> tuple[FakeMachine, list[FakeEvent]]:
    machine = FakeMachine(manual=True)
    device = machine.open()
    with device.work():
        return machine, [device.event() for _ in range(count)]


def test_sources_go_in_the_order_of_their_copies() -> None:
    """Each source is dropped when its event has been reached, and not before; `wait` returns after that."""
    machine, order = events(3)
    releaser = Releaser(Recorder())
    gone = []
    for event in order:
        source = Source()
        gone.append(weakref.ref(source))
        releaser.hold(event, source, 0.0)
        del source
    assert releaser.count() == 3
    for ended in range(1, 4):
        assert [ref() is None for ref in gone] == [True] * (ended - 1) + [False] * (4 - ended)
        machine.device.advance()
        releaser.wait(3 - ended)
        assert [ref() is None for ref in gone] == [True] * ended + [False] * (3 - ended)
    assert releaser.count() == 0
    releaser.stop()


def test_waiting_really_waits() -> None:
    """The caller's thread blocks until the device has reached enough events, and for no further event."""
    machine, order = events(3)
    releaser = Releaser(Recorder())
    for event in order:
        releaser.hold(event, Source(), 0.0)
    releaser.wait(3)
    ended = threading.Event()

    def wait() -> None:
        releaser.wait(1)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert machine.device.waits.get(timeout=PATIENCE_S) is order[0]
    machine.device.advance()
    assert machine.device.waits.get(timeout=PATIENCE_S) is order[1]
    assert not ended.is_set()
    machine.device.advance()
    thread.join(PATIENCE_S)
    assert ended.is_set()
    machine.device.advance()
    releaser.stop()


class Failing:
    """An event of a device that has failed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def synchronize(self) -> None:
        raise RuntimeError(self.text)


def test_what_the_device_says_reaches_whoever_waits() -> None:
    """Each failed event's error is raised once; its source is dropped, and later events are still waited for."""
    machine, (good,) = events(1)
    releaser = Releaser(Recorder())
    source = Source()
    gone = weakref.ref(source)
    releaser.hold(Failing("first"), source, 0.0)
    del source
    releaser.hold(Failing("second"), Source(), 0.0)
    releaser.hold(good, Source(), 0.0)
    for text in ("first", "second"):
        with pytest.raises(RuntimeError, match=text):
            releaser.wait(0)
    assert gone() is None
    machine.device.advance()
    releaser.wait(0)
    releaser.hold(Failing("third"), Source(), 0.0)
    releaser.stop()
    with pytest.raises(RuntimeError, match="third"):
        releaser.count()
    assert releaser.count() == 0


def test_stopping_waits_for_what_is_held() -> None:
    """It may be stopped twice."""
    machine, order = events(2)
    releaser = Releaser(Recorder())
    for event in order:
        releaser.hold(event, Source(), 0.0)
    assert machine.device.waits.get(timeout=PATIENCE_S) is order[0]
    stopper = threading.Thread(target=releaser.stop)
    stopper.start()
    machine.device.advance()
    assert machine.device.waits.get(timeout=PATIENCE_S) is order[1]
    assert releaser.thread.is_alive()
    machine.device.advance()
    stopper.join(PATIENCE_S)
    assert not releaser.thread.is_alive()
    releaser.stop()
    assert releaser.count() == 0
