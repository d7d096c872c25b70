"""A worker's death is reported after all frames that it had sent, in whatever order the loop notices them."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.channel import Channel, channel_pair
from asyncloader.workers.pool import WorkerPool


@pytest.mark.parametrize("held_open", [False, True])
def test_the_last_answers_come_before_the_death(held_open: bool) -> None:
    """The frames need more than one read; and a child of the worker may keep its end of the channel open."""
    ours, theirs = channel_pair()
    process: Any = SimpleNamespace(channel=Channel(ours), worker_id=0, death=Mock(), release=Mock())
    heard: list[bytes | str] = []
    pool: Any = WorkerPool.__new__(WorkerPool)
    vars(pool).update(
        _inboxes=[SimpleNamespace(frame=lambda kind, body, *_: heard.append(bytes(body)))],
        _on_exited=lambda *_: heard.append("death"),
        _listener=None,
        _watchdog=None,
        _loop=None,
        _failed=False,
        _owner=os.getpid(),
        epoch=0,
    )
    sent = [bytes([number]) * 50_000 for number in range(3)]
    for answer in sent:
        theirs.sendall(wire.pack(wire.ALL_DROPPED, answer))
    if not held_open:
        theirs.close()
    pool._on_death(process)
    assert heard == [*sent, "death"]
    process.release.assert_called_once_with()
    theirs.close()
    ours.close()


def test_a_killed_worker_that_ends_late_is_ended_once() -> None:
    """`stop` waits once for a worker that SIGKILL did not end in time, and that is still the worker of its id."""
    ended: list[Any] = []
    process, other = Mock(released=False), Mock(released=False)
    pool: Any = WorkerPool.__new__(WorkerPool)
    vars(pool).update(
        processes=[process, other],
        rings=[],
        _unkillable=[process],
        _spare={other},
        _stop_lock=threading.RLock(),
        _making=threading.Lock(),
        _source=SimpleNamespace(end=ended.extend, close=Mock()),
        _loop=None,
        _watchdog=None,
        _kept=None,
        _failed=False,
        _stopped=False,
        _owner=os.getpid(),
    )
    pool.stop()
    assert ended == [process, other]
