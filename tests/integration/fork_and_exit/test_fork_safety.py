"""A trainer forks in the middle of an epoch, while a loader's workers, threads and batches are alive: in every way in
which programs fork, parent and child continue, nothing is freed twice, and no process waits for ever. See also
test_fork_together.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader, LoaderClosed
from tests.helpers.datasets import Sized
from tests.helpers.forking import AT, Child, Here, at, epoch, expected, fork, value
from tests.helpers.running import BOTH, PATIENCE_S
from tests.processes import children_of, own_children

# Python 3.12 and later warn of a fork in a process with several threads, which is tested here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

# ------------------------------------------------------------------------------------------- programs

PROGRAMS: dict[str, dict[str, Any]] = {
    "spawned": {},
    "forked": {"preexec_fn": os.getpid},  # a real fork, with Python's hooks
    "in a session of its own": {"start_new_session": True},
    "with all that is inheritable": {"close_fds": False},
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("how", PROGRAMS)
def test_programs(kind: str, how: str) -> None:
    """Whichever way `subprocess.run` forks in the loop's body, it inherits nothing, and the epoch is complete."""

    def run(_: Here) -> None:
        done = subprocess.run(
            ["ls", "-l", "/proc/self/fd"],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
            **PROGRAMS[how],
        )
        assert "asyncloader" not in done.stdout
        assert "pidfd" not in done.stdout
        assert "socket:" not in done.stdout

    assert epoch(kind, at(AT, run)) == expected(40)


# ------------------------------------------------------------------------------------------- children


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("nbytes", [5000, 300_000])
def test_views_in_the_child_stay_as_the_parent_goes_on(kind: str, nbytes: int) -> None:
    """Small batches, and batches in segments of their own: the child sees their values at the fork, until the parent
    has used its slots many times over; then the child's exit frees nothing of the parent's.
    """
    go, went = os.pipe()
    held: list[Any] = []
    children: list[Child] = []

    def child() -> None:
        os.read(go, 1)
        assert [value(batch) for batch in held] == [0, 1, 2, 3, 4]

    def body(here: Here) -> None:
        if here.step < 5:
            held.append(here.batch)
        elif here.step == 5:
            children.append(fork(child))
            held.clear()
        elif here.step == 60:
            os.write(went, b"g")
            children.pop().wait()
        elif here.step > 60:
            held.append(here.batch)  # more than the ring can lend: were a slot freed twice, two batches would be equal
        if here.step == 79:
            assert [value(batch) for batch in held] == expected(80)[61:]

    assert epoch(kind, body, n=80, nbytes=nbytes) == expected(80)
    os.close(go)
    os.close(went)


@pytest.mark.parametrize("kind", BOTH)
def test_a_child_that_drops_what_it_inherited(kind: str) -> None:
    """Batches, iterator and loader are deleted in the child, one after the other, and garbage is collected: the child's
    leases, threads and finalizers touch nothing of the parent's.
    """
    held: list[Any] = []
    workers: list[int] = []

    def child(here: Here) -> None:
        held.clear()
        here.batch = None
        gc.collect()
        here.batches = None
        gc.collect()
        here.loader = None
        gc.collect()

    def body(here: Here) -> None:
        held.append(here.batch)
        if here.step in AT:
            workers[:] = children_of(os.getpid())
            fork(lambda: child(here)).wait()
            assert set(workers) <= set(children_of(os.getpid()))
        if len(held) == 7:
            assert [value(batch) for batch in held] == expected(40)[here.step - 6 : here.step + 1]
            held.clear()

    assert epoch(kind, body) == expected(40)


@pytest.mark.parametrize("kind", BOTH)
def test_a_child_that_goes_on_with_the_parents_iterator(kind: str) -> None:
    """`next` raises `LoaderClosed`, each time; `close` returns; a new iterator of the closed loader is refused; and the
    parent's epoch is complete.
    """

    def asks_sync(here: Here) -> None:
        for _ in range(3):
            with pytest.raises(LoaderClosed, match="forked"):
                next(here.batches)
        here.batches._shutdown_workers()
        here.loader.close()
        here.loader.close()
        with pytest.raises(LoaderClosed, match="closed"):
            iter(here.loader)

    def asks_async(here: Here) -> None:
        async def ask() -> None:
            for _ in range(3):
                with pytest.raises(LoaderClosed, match="forked"):
                    await anext(here.batches)
            await here.batches.aclose()
            await here.loader.aclose()
            here.loader.close()
            with pytest.raises(LoaderClosed, match="closed"):
                aiter(here.loader)

        asyncio.run(ask())

    ask = asks_sync if kind == "sync" else asks_async
    assert epoch(kind, at(AT, lambda here: fork(lambda: ask(here)).wait())) == expected(40)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("own", BOTH)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_child_with_a_loader_of_its_own(kind: str, own: str, workers: int) -> None:
    """A new loader, of either kind, with workers and without, works from start to end in the child."""

    def child() -> None:
        assert epoch(own, lambda _: None, n=10, num_workers=workers, timeout=PATIENCE_S if workers else 0) == expected(
            10
        )
        assert not own_children()

    assert epoch(kind, at((3,), lambda _: fork(child).wait())) == expected(40)


@pytest.mark.parametrize("kind", BOTH)
def test_a_child_with_the_parents_loader(kind: str) -> None:
    """The child may iterate the very loader that it inherited: from the beginning, with workers of its own."""

    def child(here: Here) -> None:
        if kind == "sync":
            assert [value(batch) for batch in here.loader] == expected(40)
            here.loader.close()
            return

        async def run() -> list[int]:
            async with here.loader:
                return [value(batch) async for batch in here.loader]

        assert asyncio.run(run()) == expected(40)

    assert epoch(kind, at((3,), lambda here: fork(lambda: child(here)).wait())) == expected(40)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("when", ["before the first batch", "between epochs", "after close"])
def test_a_fork_where_nothing_is_in_hand(kind: str, when: str) -> None:
    """Workers are starting, idle and persistent, or have exited: a child that deletes the loader does no harm."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
    make: Any = DataLoader if kind == "sync" else AsyncDataLoader
    held: list[Any] = [make(Sized([100] * 12), **options)]

    def forks(moment: str) -> None:
        def child() -> None:
            held.clear()
            gc.collect()

        if moment == when:
            fork(child).wait()

    async def run() -> None:
        for _ in range(2):
            held[1:] = [aiter(held[0])]
            forks("before the first batch")
            assert [value(batch) async for batch in held[1]] == expected(12)
            forks("between epochs")

    if kind == "sync":
        for _ in range(2):
            held[1:] = [iter(held[0])]
            forks("before the first batch")
            assert [value(batch) for batch in held[1]] == expected(12)
            forks("between epochs")
    else:
        asyncio.run(run())
    held[0].close()
    forks("after close")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_a_fork_while_a_worker_is_replaced(kind: str) -> None:
    """A worker is killed, and before another takes its place the trainer forks; the child deletes its copies: the epoch
    is complete and in order.
    """
    held: list[Any] = []
    own = set(children_of(os.getpid()))

    def child() -> None:
        held.clear()
        gc.collect()

    def kills(here: Here) -> None:
        held[:] = [here.batch, here.batches, here.loader]
        workers = sorted(set(children_of(os.getpid())) - own)
        os.kill(workers[0], signal.SIGKILL)
        for _ in range(3):
            fork(child).wait()
        held.clear()

    assert epoch(kind, at((0, 3, 11, 30), kills), seed=3, max_worker_restarts=1000) == expected(40)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_with_spawned_workers_of_its_own(method: str) -> None:
    """The child's own loader works, too, where the workers of parent and child are spawned, or are forked by a fork
    server of each process.
    """

    def child() -> None:
        assert epoch("sync", lambda _: None, n=10, multiprocessing_context=method) == expected(10)

    assert epoch("sync", at((3,), lambda _: fork(child).wait()), multiprocessing_context=method) == expected(40)
