"""How the lanes of one process take turns, and what a node says of a dataset."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

from asyncloader import RemoteIterableDataset
from asyncloader.service.dataset_facts import Facts, facts_of
from asyncloader.service.lane_host import _Host, _Lane
from tests.service import definitions


def lane(number: int, session: str) -> Any:
    made = object.__new__(_Lane)
    made.session, made.frames = session, deque([(1, b"")] * 100)
    made.channel = SimpleNamespace(fileno=lambda: number, full=False)  # type: ignore[assignment]
    return made


def test_sessions_have_equal_time() -> None:
    """However many lanes each has; one that comes late gets its share from then on, and not what it missed."""
    host: Any = _Host(None, None, None, None, Facts())  # type: ignore[arg-type]
    for number in range(8):
        host._add(lane(number, "large"))
    turns: Counter[str] = Counter()

    def take(times: int) -> None:
        for _ in range(times):
            chosen = host._next()
            chosen.frames.popleft()
            host._used[chosen.session] += 2.0 if chosen.session == "slow" else 1.0
            turns[chosen.session] += 1

    take(40)
    host._add(lane(8, "small"))
    host._add(lane(9, "slow"))
    take(50)
    assert turns["large"] == 40 + 20
    assert turns["small"] == 20
    assert turns["slow"] == 10
    for each in host._lanes.values():
        each.frames.clear()
    assert host._next() is None


def test_what_a_loader_must_know() -> None:
    """Kind, length and state; or why the dataset cannot be served."""
    for defined, expected in [
        (definitions.numbers(), Facts(False, 40, False, False)),
        (definitions.awaited(), Facts(False, 40, True, False)),
        (definitions.stream(), Facts(True, None, False, True)),
        (definitions.async_stream(), Facts(True, None, True, False)),
    ]:
        assert facts_of(defined.make().dataset) == expected
    assert "has no length" in facts_of(definitions.endless().make().dataset).problem
    # Nothing is looked for in the store yet.
    assert facts_of(RemoteIterableDataset("none.tar", shuffle_buffer=7)) == Facts(True, None, True, False, 7)
