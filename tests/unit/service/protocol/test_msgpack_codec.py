"""Cursors, records of samples and starts of epochs between a loader and a service: complete, checked on arrival."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch

from asyncloader.base.events import Cursor, SkippedSample
from asyncloader.service.protocol.msgpack_codec import MSGPACK
from asyncloader.service.protocol.msgpack_values import pack
from asyncloader.workers.fetch.dataset_state import Bookmark
from asyncloader.workers.fetch.setup import EpochStart

STATE = {"at": 3, "order": [*range(2000)], "rng": torch.arange(4)}
RECORD = SkippedSample(7, None, 0, 1, "ValueError: no", "Traceback", "skipped", None)


class Part:
    """A dataset with this state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def taken(state: Any) -> Cursor:
    """The loader's copy of the cursor that a service's worker takes of this state."""
    packed = Bookmark(Part(state), 1, MSGPACK.cursor_packer()).after_batch(4, ended=False)
    assert packed is not None
    return MSGPACK.load_cursor(packed.data).value


def test_a_cursor_arrives_as_it_was() -> None:
    """The cursor's state is complete, with a long list; each reading gives a copy of its own."""
    cursor = taken(STATE)
    assert (*cursor[:3], *cursor[4:]) == (1, 4, False, None, "", "")
    assert cursor.dataset["at"] == 3
    assert cursor.dataset["order"] == STATE["order"]
    assert cursor.dataset["rng"].tolist() == [0, 1, 2, 3]
    packed = MSGPACK.load_cursor(pack(tuple(cursor._replace(dataset=[1]))))
    packed.value.dataset.append(2)
    assert packed.value.dataset == [1]


def test_a_state_that_cannot_be_sent_does_not_fail_the_batch() -> None:
    """The cursor names the value that cannot be sent, and has no state, as where a state cannot be pickled."""
    cursor = taken({"lock": threading.Lock()})
    assert cursor[:5] == (1, 4, False, None, None)
    assert cursor.problem.startswith("its state [3]['lock'] is a _thread.lock, which a service does not send")


BROKEN: dict[str, Any] = {
    "a pickle": pickle.dumps(tuple(Cursor(1, 1, False, None, None)), 5),
    "too few fields": pack((1, 1, False)),
    "a count below zero": pack((-1, 1, False, None, None, "", "")),
    "an unknown way to restore it": pack((1, 1, False, None, None, "", "often")),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_cursor_is_refused_on_arrival(data: bytes) -> None:
    """The cursor is refused before its value is read: the answer that it was sent with must not count."""
    with pytest.raises(ValueError, match="broken stream"):
        MSGPACK.load_cursor(data)


@pytest.mark.parametrize("itself", ["", "within", "before", "ended"])
def test_an_epoch_may_begin_with_any_cursor(itself: str) -> None:
    """A cursor may be that of the end of the epoch before, from which a persistent loader's new workers go on."""
    start = EpochStart(epoch=3, cursor=Cursor(0, 0, False, {"at": 4}, {"at": 20}, itself=itself))
    assert MSGPACK.load_start(MSGPACK.dumps(tuple(start))) == start


@pytest.mark.parametrize(
    "fields",
    [
        {"epoch": -1},
        {"streams": (EpochStart(),)},
        {"message": b"x"},  # would be unpickled
        {"message": ""},
        {"cursor": (0,)},
        {"cursor": Cursor(-1, 0, False, None, None)},
    ],
    ids=str,
)
def test_a_start_that_no_loader_sends(fields: dict[str, Any]) -> None:
    """A node's process reads what a loader has sent."""
    with pytest.raises(ValueError, match="broken stream: a start of an epoch, a cursor"):
        MSGPACK.load_start(MSGPACK.dumps(tuple(EpochStart(epoch=1)._replace(**fields))))


def test_records_arrive_as_they_were() -> None:
    """An index that cannot be sent is replaced by its text."""
    assert MSGPACK.load_records(MSGPACK.dump_records([RECORD])) == [RECORD]
    lock = threading.Lock()
    sent = MSGPACK.load_records(MSGPACK.dump_records([RECORD._replace(index=lock)]))
    assert sent == [RECORD._replace(index=repr(lock), substitute="None")]
    for broken in (pack([]), pack([3]), pickle.dumps([RECORD])):
        with pytest.raises(ValueError, match="broken stream"):
            MSGPACK.load_records(broken)
