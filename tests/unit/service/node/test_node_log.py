"""A node's log: lines that a peer causes are escaped, shortened and counted."""

from __future__ import annotations

import io
import logging

import pytest

from asyncloader.base.peer_text import LINES_PER_MINUTE
from asyncloader.service.node.node_log import ALL_PER_MINUTE, NodeLog


class Log:
    """A log whose clock stands still, with its output."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._text = io.StringIO()
        handler = NodeLog(lambda: self.now)
        handler.setStream(self._text)
        self.logger = logging.Logger("a node's")  # noqa: LOG001 - of this test alone
        self.logger.addHandler(handler)

    def lines(self) -> list[str]:
        """The lines written since the last call."""
        text = self._text.getvalue()
        self._text.seek(0)
        self._text.truncate()
        return text.splitlines()


@pytest.fixture
def log() -> Log:
    return Log()


def test_no_line_is_forged(log: Log) -> None:
    """Neither a peer's text nor an exception's can look like another record."""
    forged = "a\n2026-01-01 00:00:00,000 ERROR forged\x1b[2J"
    log.logger.info("refused: %s", forged, extra={"peer": "10.0.0.1"})
    (line,) = log.lines()
    assert line.endswith(r"INFO refused: a\n2026-01-01 00:00:00,000 ERROR forged\x1b[2J")
    log.logger.warning("died: %s", forged)
    try:
        raise ValueError(forged)
    except ValueError:
        log.logger.exception("failed", extra={"peer": "10.0.0.1"})
    first, *more = lines = log.lines()
    assert first.endswith("WARNING died: a")
    assert [line for line in lines if not line.startswith("  | ")] == [first, more[1]]
    assert lines[-1] == r"  | 2026-01-01 00:00:00,000 ERROR forged\x1b[2J"


def test_many_long_lines(log: Log) -> None:
    """Lines of one peer, of very many peers, and of none: those of none are kept, and all omissions are reported."""
    for _ in range(10_000):
        log.logger.info("%s", "x" * 100_000, extra={"peer": "10.0.0.1"})
    lines = log.lines()
    assert len(lines) == LINES_PER_MINUTE
    assert max(map(len, lines)) < 600
    for number in range(10_000):
        log.logger.info("hello", extra={"peer": f"10.0.1.{number}"})
    first, *more = log.lines()
    assert first.endswith(" (9,940 lines before this one were left out)")
    assert len(more) == ALL_PER_MINUTE - LINES_PER_MINUTE - 1
    log.logger.warning("it drains")
    (line,) = log.lines()
    assert line.endswith("WARNING it drains (9,760 lines before this one were left out)")
    log.now += 60
    log.logger.info("hello", extra={"peer": "10.0.0.1"})
    assert log.lines()[0].endswith("INFO hello")
