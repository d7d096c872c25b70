"""Epochs in which one thing fails at a drawn moment: `python -m tests.stress --interrupted`.

A case runs undisturbed first: that gives the expected epochs, and states. Then it runs with the fault; where the caller
gets an error, it does one of the things that the documentation allows. Every batch must come once, in its place, and
every state that was taken at an error must resume with the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import traceback
import warnings
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from asyncloader import LoaderError, WorkerDied
from asyncloader.transports import TransportError
from tests.conftest import World, _wait_for_endings
from tests.helpers.running import LOOPS
from tests.stress.child import _noises
from tests.stress.interrupted_cases import TIED, Case, Flags, Hook, is_whole, make_loader, plain, start_server

EPOCHS = 2
MOST_ERRORS = 12  # of one fault: several workers, and tasks, may have met it
CANCELLED = (KeyboardInterrupt, asyncio.CancelledError)
ALLOWED: dict[str, Any] = {
    "store": TransportError,
    "ctrl-c": CANCELLED,
    "cancel": CANCELLED,
    "disk": (OSError, LoaderError, MemoryError),
}
Batches = list[list[Any]]


class Wrong(Exception):
    """The case has failed."""


class Reader:
    """Reads a loader step by step, with either kind of loop, and lets a fault of the caller's strike in a step.

    A batch that was taken is in `got`, whenever Ctrl-C or a cancellation comes.
    """

    def __init__(self, case: Case, hook: Hook, url: str, cache: Path, kind: str = "sync") -> None:
        self.case, self.hook, self.kind, self._made_with = case, hook, kind, (url, cache)
        self.runner = asyncio.Runner(loop_factory=LOOPS[kind]) if kind != "sync" else None
        self.loader: Any = None
        self.iterator: Any = None
        self.got: list[Any] = []
        self._inside = False
        self._task: asyncio.Task[Any] | None = None

    def open(self, workers: int, **options: Any) -> None:
        """Make a loader."""
        url, cache = self._made_with
        self.workers = workers
        self.loader = make_loader(self.case, self.hook, url, cache, workers, self.kind, **options)

    def interrupt(self) -> None:
        """Ctrl-C, as `asyncio.Runner` treats it; outside of a step it is lost."""
        if self._task is not None and self.runner is not None:
            self._task.cancel()
            self.runner.get_loop().call_soon_threadsafe(lambda: None)
        elif self._inside:
            raise KeyboardInterrupt

    def step(self, *, due: bool = False) -> list[Any] | None:
        """Begin an epoch if none is in work, and return the next batch; None at the end."""
        if due and self.case.trigger == "timer" and self.case.failure == "ctrl-c":
            signal.setitimer(signal.ITIMER_REAL, self.case.delay)
        try:
            if self.runner is not None:
                self.runner.run(self._step(cancels=due and self.case.failure == "cancel"))
            else:
                self._inside = not self.workers
                if self.iterator is None:
                    self.iterator = iter(self.loader)
                self._inside = True
                self.got.extend(islice(self.iterator, 1))
        finally:
            self._inside, self._task = False, None
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self.taken()

    def taken(self) -> list[Any] | None:
        """The batch that was taken."""
        return plain(self.case, self.got.pop()) if self.got else None

    async def _step(self, *, cancels: bool) -> None:
        self._task, loop = asyncio.current_task(), asyncio.get_running_loop()

        def strike(task: asyncio.Task[Any] | None = self._task) -> None:
            if task is not None and task is self._task and self.hook.flags.strikes():
                task.cancel()

        def tick(left: int) -> None:
            loop.call_soon(tick, left - 1) if left else strike()

        if cancels and self.case.trigger == "ticks":
            tick(self.case.number)
        elif cancels:
            loop.call_later(self.case.delay, strike)
        if self.iterator is None:
            self.iterator = aiter(self.loader)
        with contextlib.suppress(StopAsyncIteration):
            self.got.append(await anext(self.iterator))
        self._task = None

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the loader where it is iterated."""

        async def within() -> Any:
            return getattr(self.loader, method)(*args)

        return getattr(self.loader, method)(*args) if self.runner is None else self.runner.run(within())

    def save(self) -> str:
        """Return the loader's state as JSON."""
        return json.dumps(self.call("state_dict"))

    def load(self, state: str) -> None:
        """Load a state."""
        self.call("load_state_dict", json.loads(state))

    def rest(self) -> Batches:
        """Return all further batches of the epoch."""
        return list(iter(self.step, None))

    def drop(self, *, closes: bool = True) -> None:
        """Let go of the loader."""
        loader = getattr(self.loader, "loader", self.loader)  # of packed rows
        self.iterator = self.loader = None
        if closes and loader is not None:
            loader.close() if self.runner is None else self.runner.run(loader.aclose())

    def end(self, *, closes: bool = True) -> list[str]:
        """End the loop, too; pending tasks."""
        self.drop(closes=closes)
        if self.runner is None:
            return []
        pending = [f"pending: {task!r}" for task in asyncio.all_tasks(self.runner.get_loop()) if closes]
        self.runner.close()
        return pending


class Run:
    """The disturbed run, and its comparison with the expected epochs."""

    def __init__(self, case: Case, folder: Path, flags: Flags, url: str) -> None:
        self.case, self.folder, self.flags, self.url = case, folder, flags, url
        self.errors: list[str] = []
        self.states: list[tuple[int, int, str, bool]] = []  # at errors: epoch, batches, state, whether in order
        self.restarted = False  # in torch mode later epochs have another order then
        self.batches = 0
        self.expected: list[Batches] = []
        states = self._undisturbed()
        epoch = self.expected[case.epoch]
        self.base = 0 if case.resumed is None else int(case.resumed * len(epoch))
        self.at = max(self.base, min(int(case.place * len(epoch)), len(epoch) - 1))
        self.resumed = None if case.resumed is None else states[case.epoch][self.base]
        samples = [0] if case.what == "packed" else [number for number, _ in epoch[self.at]]
        hook = Hook(case, flags, case.number % 60 if case.what == "packed" else samples[case.number % len(samples)])
        self.reader = Reader(case, hook, url, folder / "cache", case.loader)

    def _calm(self) -> Reader:
        # Forked workers: spawned ones take ten times as long, and give the same.
        calm = Case(**{**vars(self.case), "method": "fork"})
        return Reader(calm, Hook(calm, self.flags), self.url, self.folder / "undisturbed")

    @property
    def _same(self) -> int:
        """A number of workers that gives the case's batches. Persistent ones draw no base seed for later epochs."""
        case = self.case
        return case.workers if case.what in TIED or (case.persistent and not case.seeded) else 0

    def _undisturbed(self) -> list[list[str]]:
        reader, states = self._calm(), list[list[str]]()
        torch.manual_seed(self.case.seed)
        reader.open(self._same)
        for _ in range(EPOCHS + 1):  # a state at the end of the last may resume with the next
            states.append([reader.save()])
            self.expected.append([])
            while (batch := reader.step()) is not None:
                self.expected[-1].append(batch)
                states[-1].append(reader.save())
            reader.iterator = None
        reader.end()
        if not all(is_whole(self.case, epoch) for epoch in self.expected):
            raise Wrong(f"an undisturbed epoch is not whole: {self.expected}")
        return states

    # ---------------------------------------------------------------------------------------- the fault

    def strike(self) -> None:
        """Arm the fault; strike what is struck from this process."""
        case, flags = self.case, self.flags
        flags["armed"] = True
        if case.trigger != "take":
            return
        pids = [pid for pid in self._pids() if Path(f"/proc/{pid}").exists()]
        if case.failure == "store":
            flags["down"] = True
        elif case.failure == "disk" and flags.strikes():
            self._limit(0)
        elif case.failure == "kill" and pids and flags.strikes():
            os.kill(pids[case.number % len(pids)], signal.SIGKILL)

    def _pids(self) -> list[int]:
        return sorted(int(each.suffix[1:]) for each in self.folder.glob("worker.*"))

    def _limit(self, size: int) -> None:
        for pid in [os.getpid(), *self._pids()]:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    def calm(self) -> None:
        """The fault is over."""
        self.flags["armed"] = self.flags["down"] = False
        if self.case.failure == "disk":
            self._limit(resource.RLIM_INFINITY)

    # ---------------------------------------------------------------------------------------- reading

    def go(self) -> None:
        """Read all epochs."""
        case, first = self.case, 0
        torch.manual_seed(case.seed)
        if case.failure == "rank":
            self._ranks()
            return
        self.reader.open(case.workers)
        if self.resumed is not None:
            first, self.restarted = case.epoch, not case.seeded
            self.reader.load(self.resumed)
        for epoch in range(first, EPOCHS):
            resumes = self.resumed is not None and epoch == first
            # In torch mode a state between epochs does not have the next order.
            exact = (resumes and self.base > 0) or not self.restarted
            self._epoch(epoch, self.base if resumes else 0, exact=exact)
            self.reader.iterator = None

    def _epoch(self, epoch: int, at: int, *, exact: bool) -> None:
        case, reader, base = self.case, self.reader, at
        seen: Batches = []
        while True:
            due = epoch == case.epoch and at >= self.at and not self.flags["struck"] and not self.errors
            if due:
                self.strike()
            error: BaseException | None = None
            try:
                batch = reader.step(due=due)
            except BaseException as raised:
                error, batch = raised, reader.taken()
                self.calm()
                self._check(error, f"before batch {at} of epoch {epoch}")
            if batch is not None:
                seen.append(batch)
                at, self.batches = at + 1, self.batches + 1
            self._compare(epoch, base, seen, exact=exact, over=batch is None and error is None)
            if case.failure == "disk":
                self.calm()
            if error is not None:
                then, exact = self._go_on(error, epoch, base, at, exact=exact)
                if then is not None:
                    seen, base, at = [], then, then
            elif batch is None:
                self._save(epoch + 1, 0)
                return
            else:
                self._save(epoch, at)

    def _check(self, error: BaseException, where: str) -> None:
        allowed = ALLOWED.get(self.case.failure, WorkerDied)
        replaces = self.case.seeded if self.case.restarts is None else True
        unexpected = not isinstance(error, allowed) or (self.case.failure == "kill" and replaces)
        if unexpected or len(self.errors) > MOST_ERRORS:
            raise Wrong(f"{type(error).__name__} {where}, after {self.errors}: {error}") from error
        self.errors.append(f"{type(error).__name__} {where}")

    def _compare(self, epoch: int, base: int, seen: Batches, *, exact: bool, over: bool) -> None:
        due = self.expected[epoch][base:]
        if seen == due[: None if over else len(seen)] or (not exact and not over) or _same(seen, due, exact=exact):
            return
        k = next((k for k, (a, b) in enumerate(zip(seen, due, strict=False)) if a != b), min(len(seen), len(due)))
        words = f"batch {base + k} is {seen[k : k + 1]}, not {due[k : k + 1]}; {len(seen)} of {len(due)} batches"
        raise Wrong(f"epoch {epoch} from {base}, after {self.errors}: {words}")

    def _save(self, epoch: int, at: int) -> str:
        """Take a state, and look at what it says of itself."""
        text = self.reader.save()
        if self.case.what != "packed":
            state = json.loads(text)
            between = at == 0 and state["finished"] and state["epoch"] == epoch - 1  # the next epoch has not begun
            over = at == len(self.expected[epoch])
            if not between and (state["step"] != at or state["finished"] > over or state["epoch"] != epoch):
                words = {name: state[name] for name in ("epoch", "step", "finished")}
                raise Wrong(f"after {at} batches of epoch {epoch} and {self.errors} the state says {words}")
        return text

    # ---------------------------------------------------------------------------------------- after an error

    def _go_on(self, error: BaseException, epoch: int, base: int, at: int, *, exact: bool) -> tuple[int | None, bool]:
        """Do what the case's caller does: where the epoch goes on in a new iterator; whether in order."""
        case, then, state = self.case, self.case.then, self._save(epoch, at)
        if at == len(self.expected[epoch]):
            # A worker may have died before it said that its stream is over.
            then = "state" if case.failure == "kill" and not json.loads(state).get("finished", True) else "retry"
        elif then == "retry" and (
            case.failure in ("kill", "disk") or (case.failure == "store" and self.reader.workers)
        ):
            then = "state"  # the epoch may be over with the error
        elif then == "loop" and case.what == "packed" and at > base:
            then = "state"  # once the last window was read, a new loop begins the next epoch
        if not case.seeded and at == 0:
            self.restarted, exact = True, False  # the order's seed may be drawn again
        if exact or at == 0:  # else it is not known which samples are left
            self.states.append((epoch, at, state, exact))
        if then == "retry":
            return None, exact
        self.restarted = not case.seeded
        self.reader.iterator = None
        if then == "loop":  # an epoch that has not begun goes on from the loaded state, another from its beginning
            return (base, exact) if at == base else (0, exact and case.seeded)
        self.reader.drop(closes=case.closes)
        self.reader.open(case.next_workers)
        self.reader.load(state)
        return at, exact

    def resume(self) -> None:
        """The first and the last state that were taken give the rest of the epoch in another loader."""
        for epoch, at, state, exact in self.states[:1] + self.states[1:][-1:]:
            reader, due = self._calm(), self.expected[epoch][at:]
            reader.open(self._same)
            reader.load(state)
            rest = reader.rest()
            reader.end()
            # After the last batch the loop may be over, or not.
            if not any(_same(rest, each, exact=exact) for each in ([due] if due else [due, *self.expected])):
                words = f"{len(rest)} batches, {rest[:1]}, not {len(due)}, {due[:1]}"
                raise Wrong(f"the state at batch {at} of epoch {epoch}, after {self.errors}, resumes with {words}")

    def _ranks(self) -> None:
        """Two ranks read in processes of their own, and one dies. The other's last state goes on here, alone."""
        pids = [self._fork_rank(rank) for rank in range(2)]
        if [os.waitpid(pid, 0)[1] for pid in pids] != [0, signal.SIGKILL]:
            raise Wrong("a rank did not end as it should")
        self.flags["struck"] = True
        parts = [json.loads((self.folder / f"rank {rank}").read_text()) for rank in range(2)]
        joined = [
            [tuple(each) for each in a + b] for a, b in zip(parts[0]["batches"], parts[1]["batches"], strict=True)
        ]
        self._compare(0, 0, joined, exact=True, over=False)
        self.reader.open(self.case.next_workers)
        self.reader.load(parts[0]["state"])
        self._compare(0, self.at, self.reader.rest(), exact=True, over=True)

    def _fork_rank(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            reader = Reader(self.case, self.reader.hook, self.url, self.folder / "cache", self.case.loader)
            reader.open(self.case.workers, rank=rank, world_size=2, batch_size=self.case.batch_size // 2)
            batches = [reader.step() for _ in range(self.at)]
            record = {"batches": batches, "state": reader.save()}
            (self.folder / f"rank {rank}").write_text(json.dumps(record))
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            reader.end()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _same(seen: Batches, due: Batches, *, exact: bool) -> bool:
    return seen == due if exact else Counter(chain(*seen)) == Counter(chain(*due))


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case; a report for JSON, whose `problems` are empty where all was well."""
    flags, problems, run = Flags(folder), list[str](), None
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT) if flags.strikes() else None)
    signal.signal(signal.SIGINT, lambda *_: run.reader.interrupt() if run is not None else None)
    with asyncio.Runner(loop_factory=LOOPS["uvloop"]) as runner:
        runner.run(asyncio.sleep(0))  # libuv opens a pair of descriptors for the process when it is first used
    server, url = start_server(case, flags)
    with warnings.catch_warnings(), _noises(problems):
        warnings.simplefilter("ignore")
        try:
            run = Run(case, folder, flags, url)
            gc.collect()
            before = World.now()
            try:
                run.go()
            finally:
                run.calm()
                problems += run.reader.end(closes=case.closes)
            run.resume()
            gc.collect()
            if World.now().since(before):
                _wait_for_endings(before)
                gc.collect()
            problems += [f"left behind: {thing}" for thing in World.now().since(before)]
        except Wrong as wrong:
            problems.append(str(wrong))
        except BaseException:
            problems.append(f"the run failed: {traceback.format_exc()[-3000:]}")
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return {"problems": problems, "struck": flags["struck"], "batches": run.batches if run is not None else 0}
