"""What a loader may hold at a node."""

from __future__ import annotations

import pytest

from asyncloader.errors import RingMemoryError
from asyncloader.service.node.memory_quota import Session


def test_what_is_unsent_makes_it_full() -> None:
    """Until enough was sent; who waits is called once. Rings alone never do, and one batch must fit."""
    called: list[bool] = []
    session = Session("one", 100)
    session.hold(90)
    with pytest.raises(RingMemoryError, match="the most for one loader"):
        session.hold(11)
    with pytest.raises(RingMemoryError, match="the most for one loader"):
        session.check(101)
    session.check(100)
    session.hold(10)
    assert not session.full
    session.count(300)
    assert session.full

    def resume() -> None:
        called.append(session.full)

    session.wait(resume)
    session.wait(resume)
    session.count(-299)
    assert (session.full, called) == (True, [])
    session.count(-1)
    session.count(1)
    session.count(-1)
    assert called == [False]
    session.count(1)
    session.wait(resume)
    session.leave(resume)
    session.hold(-1)
    assert not session.full
    assert called == [False]
    Session("two", None).check(1 << 60)
