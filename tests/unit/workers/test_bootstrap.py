"""The collector is off while a spawned worker starts."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest

from asyncloader.workers.bootstrap import Bootstrap


@pytest.fixture(autouse=True)
def freezes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """Records calls of `gc.freeze`, which would change the collections of later tests, and restores the collector."""
    was = gc.isenabled()
    calls: list[None] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(None))
    yield calls
    (gc.enable if was else gc.disable)()


def test_the_collector_rests_from_the_unpickling_on() -> None:
    """No collection runs over the objects that are unpickled and imported after the target."""
    pickle.loads(pickle.dumps(Bootstrap(0.0)))
    assert not gc.isenabled()


def test_unpickling_imports_nothing_heavy() -> None:
    """The arguments are unpickled after the target; torch must not be imported before the collector stops."""
    code = (
        "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1]));"
        "print(sorted({'torch', 'numpy', 'asyncio'} & set(sys.modules)))"
    )
    data = pickle.dumps(Bootstrap(0.0)).hex()
    told = subprocess.run(
        [sys.executable, "-c", code, data], capture_output=True, text=True, check=True, env=os.environ
    )
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_what_it_was_when_the_worker_runs(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector is on if it was on; a site that has stopped it keeps it stopped."""
    seen: list[bool] = []
    monkeypatch.setattr("asyncloader.workers.worker.worker_main", lambda *_: seen.append(gc.isenabled()))
    (gc.enable if enabled else gc.disable)()
    pickle.loads(pickle.dumps(Bootstrap(0.0)))(0, None, None, None)
    assert seen == [enabled]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_forked_worker_leaves_the_collector_alone(
    enabled: bool, freezes: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like everything else, the collector's state is inherited from the trainer."""
    seen: list[bool] = []
    monkeypatch.setattr("asyncloader.workers.worker.worker_main", lambda *_: seen.append(gc.isenabled()))
    (gc.enable if enabled else gc.disable)()
    Bootstrap(0.0)(0, None, None, None)
    assert seen == [enabled]
    assert not freezes
