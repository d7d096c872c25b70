"""A worker's lines for the log, as the trainer's log gets them."""

from __future__ import annotations

import logging
import pickle
from typing import Any
from unittest.mock import Mock

import pytest

from asyncloader.workers.dialect import PICKLE
from asyncloader.workers.inbox import Inbox
from asyncloader.workers.ipc import wire
from asyncloader.workers.ipc.peer_text import LINE, LINES_PER_MINUTE


def send(inbox: Inbox, line: Any, listener: Any) -> None:
    inbox.frame(wire.LOG, pickle.dumps(line), 0, listener, None)


def test_lines_are_escaped_cut_and_counted() -> None:
    """What is left out is reported when the worker ends, if not before."""
    inbox, listener = Inbox(Mock(worker_id=3, dialect=PICKLE), Mock()), Mock()
    for _ in range(1000):
        send(inbox, (10**9, "x\n\x1b[2J" * 1000, "a\nstore", True), listener)
    calls = [each.args for each in listener.on_log.call_args_list]
    assert len(calls) == LINES_PER_MINUTE
    level, text, store, silent = calls[0]
    assert (level, store, silent) == (logging.CRITICAL, r"a\nstore", True)
    assert text.isprintable()
    assert len(text) <= LINE
    inbox.report_left_out(listener)
    inbox.report_left_out(listener)
    (last,) = (each.args for each in listener.on_log.call_args_list[LINES_PER_MINUTE:])
    assert last == (logging.WARNING, "940 lines that worker 3 had for the log were left out", None, False)


@pytest.mark.parametrize("line", [None, 7, "text", (1, "text"), ("high", "text", None, False)])
def test_no_line(line: object) -> None:
    """The stream is broken, as by any other frame that cannot be read."""
    with pytest.raises(ValueError, match="from worker 3"):
        send(Inbox(Mock(worker_id=3, dialect=PICKLE), Mock()), line, Mock())
