"""Objects that are made and freed while a hook looks at them."""

from __future__ import annotations

import gc
import sys
import threading

from asyncloader.base.live_objects import LiveObjects


class Thing:
    """An object of the kind."""


def _add(live: LiveObjects[Thing], things: list[Thing]) -> None:
    for thing in things:
        live.add(thing)


def test_it_keeps_nothing_alive() -> None:
    """Neither an object in the set, nor an object that a reader has seen, is kept alive."""
    live = LiveObjects[Thing]()
    things = [Thing() for _ in range(3)]
    _add(live, [*things, things[0]])
    assert {id(each) for each in live} == {id(thing) for thing in things}
    assert len(list(live)) == 3
    del things[1:]
    gc.collect()
    assert list(live) == things


def test_other_threads_may_add_meanwhile() -> None:
    """A loader may be made in one thread while another forks. (`weakref.WeakSet` raises "changed size".)"""
    live = LiveObjects[Thing]()
    over = threading.Event()
    kept = [Thing() for _ in range(500)]
    _add(live, kept)

    def add() -> None:
        while not over.is_set():
            live.add(Thing())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=add)
    thread.start()
    try:
        for _ in range(200):
            assert {*map(id, kept)} <= {*map(id, live)}
    finally:
        over.set()
        sys.setswitchinterval(interval)
        thread.join()
