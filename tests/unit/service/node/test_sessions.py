"""The memory that a loader may take at a node."""

from __future__ import annotations

import pytest

from asyncloader.errors import RingMemoryError
from asyncloader.service.node.sessions import MemoryQuota


def test_what_is_unsent_makes_it_full() -> None:
    """The quota is full until enough was sent; a waiting function is called once. Rings alone never fill it."""
    called: list[bool] = []
    quota = MemoryQuota("one", 100)
    quota.hold(90)
    with pytest.raises(RingMemoryError, match="the most for one loader"):
        quota.hold(11)
    with pytest.raises(RingMemoryError, match="the most for one loader"):
        quota.check(101)
    quota.check(100)
    quota.hold(10)
    assert not quota.full
    quota.count(300)
    assert quota.full

    def resume() -> None:
        called.append(quota.full)

    quota.wait(resume)
    quota.wait(resume)
    quota.count(-299)
    assert (quota.full, called) == (True, [])
    quota.count(-1)
    quota.count(1)
    quota.count(-1)
    assert called == [False]
    quota.count(1)
    quota.wait(resume)
    quota.leave(resume)
    quota.hold(-1)
    assert not quota.full
    assert called == [False]
    MemoryQuota("two", None).check(1 << 60)


def test_rings_share_the_room() -> None:
    """A ring may have an equal share, of what is left, its predecessor's memory included."""
    quota = MemoryQuota("one", 100)
    quota.connections = 2
    assert quota.room(0) == 50
    quota.hold(90)
    assert (quota.room(0), quota.room(30), quota.room(60)) == (10, 40, 50)
    assert MemoryQuota("two", None).room(0) is None


def test_all_that_wait_are_called() -> None:
    """Waiting functions are called in order; a function that waits again within its call is called the next time."""
    called: list[str] = []
    quota = MemoryQuota("one", 100)

    def again() -> None:
        called.append("again")
        quota.wait(again)

    quota.count(101)
    quota.wait(again)
    quota.wait(lambda: called.append("other"))
    quota.count(-1)
    assert called == ["again", "other"]
    quota.count(1)
    quota.count(-1)
    assert called == ["again", "other", "again"]
