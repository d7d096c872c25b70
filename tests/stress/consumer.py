"""Reads a loader as a case says, lets its faults strike in between, and records batches and errors.

The record holds no batch (unless the case hoards) and no exception: either would keep slots leased, or frames
alive.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.stress.faults import LET_GO, SECOND, kill_workers, limited
from tests.stress.schedule import KILLING, Case, Fault
from tests.stress.workloads import Maker, content, samples_of

SLOW_S = 0.003
FORKED_S = 20.0  # for a forked child to look at its batch


class Died(Exception):
    """Ends the consumer's thread."""


class Event(NamedTuple):
    """A recorded event: "batch", "error" or "end".

    `wrong` describes the fault in a batch's content; `names` are the classes of an error, from its own to the root.
    """

    kind: str
    indices: tuple[int, ...] = ()
    draws: tuple[tuple[float, ...], ...] = ()
    wrong: str = ""
    names: tuple[str, ...] = ()
    text: str = ""

    def __str__(self) -> str:
        if self.kind == "error":
            return f"{self.names[0]}({self.text[:700] if self.text else ''})"
        return self.kind if self.kind == "end" else f"{list(self.indices)}"


class Consumer:
    """One consumer of one loader, over all epochs.

    Args:
        case: the case.
        maker: knows the sizes of samples.
        folder: the case's own.
    """

    def __init__(self, case: Case, maker: Maker, folder: Path) -> None:
        self.case = case
        self.epochs: list[list[Event]] = []
        self.struck = 0  # workers, from outside
        self.befallen = 0  # other faults in this process
        self.problems: list[str] = []
        self.state: str | None = None
        """The state from which another loader continues, as JSON."""
        self._resumed = False
        self._maker = maker
        self._folder = folder
        self._last: tuple[Event, Any] | None = None
        self._held: list[tuple[Event, Any]] = []
        self._outside = [fault for fault in case.faults if fault not in case.having(*KILLING, "raise", "starve")]
        self._limits: list[tuple[int, contextlib.ExitStack]] = []
        self._forked: list[tuple[int, int]] = []
        self._threads: list[threading.Thread] = []
        self._closing: concurrent.futures.Future[None] | None = None

    # ---------------------------------------------------------------------------------------- both kinds

    @property
    def events(self) -> list[Event]:
        """The events of this epoch so far."""
        return self.epochs[-1]

    def begin(self, loader: Any) -> None:
        """Begin an epoch. In seeded mode its number is set: otherwise an epoch that broke off would be begun again."""
        if self.case.seeded:
            loader.set_epoch(len(self.epochs))
        for _, limits in self._limits:
            limits.close()
        self._limits.clear()
        if self.epochs:
            (self._folder / SECOND).touch()
        for fault in self._outside:
            if (fault.epoch, fault.at) == (len(self.epochs), -1):
                self.struck += kill_workers(fault)
        self.epochs.append([])

    def _epochs(self, loader: Any) -> Iterator[None]:
        """The epochs that remain; the rest of the last epoch, if another loader left in the middle of it."""
        if self.state is not None:
            loader.load_state_dict(json.loads(self.state))
            self.state, self._resumed = None, True
            yield
            return
        for _ in range(self.case.epochs):
            self.begin(loader)
            yield

    @property
    def _endless(self) -> bool:
        return len(self.events) > 2 * self.case.batches + 20

    @property
    def leaves_now(self) -> bool:
        """Whether the moment to leave has come."""
        case = self.case
        last = len(self.epochs) == case.epochs
        if case.leave == "exhaust" or self._resumed:
            return False
        return last and len(self.events) == case.leave_after

    def take(self, batch: Any) -> None:
        """A batch came."""
        event = self._read(batch)
        self.events.append(event)
        self._last = (event, batch)
        if self.case.consumer == "hoarding":
            self._held.append(self._last)
        if self.case.consumer == "slow":
            threading.Event().wait(SLOW_S)

    def _read(self, batch: Any) -> Event:
        samples = samples_of(self.case, batch)
        wrong = ""
        for index, data, _ in samples:
            if index >= 0 and not torch.equal(data, content(index, self._maker.nbytes(index))):
                wrong = f"sample {index} has wrong bytes"
        return Event("batch", tuple(s[0] for s in samples), tuple(s[2] for s in samples), wrong)

    def fail(self, error: BaseException) -> None:
        """An error came."""
        names = tuple(kind.__name__ for kind in type(error).__mro__[:-1])
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        self.events.append(Event("error", names=names, text=text))

    def strike(self) -> list[Fault]:
        """Let the faults strike whose moment has come; gives the cancellations among them, which are the caller's."""
        for left, limits in list(self._limits):
            if len(self.events) >= left:
                limits.close()
                self._limits.remove((left, limits))
        moment = (len(self.epochs) - 1, len(self.events))
        due = [f for f in self._outside if (f.epoch, f.at) == moment]
        self._outside = [f for f in self._outside if f not in due]
        for fault in due:
            if "worker" in fault.kind:
                self.struck += kill_workers(fault)
                continue
            self.befallen += 1
            if fault.kind == "fork":
                self._fork()
            elif fault.kind != "cancel":
                limits = contextlib.ExitStack()
                limits.enter_context(limited(fault))
                self._limits.append((len(self.events) + fault.number, limits))
        return [fault for fault in due if fault.kind == "cancel"]

    def _fork(self) -> None:
        """Fork as a trainer does. The child checks the batch that it holds after the parent has read many more."""
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 4
            try:
                os.read(told, 1)
                code = 3 if self._last is not None and self._read(self._last[1]) != self._last[0] else 0
            finally:
                os._exit(code)
        os.close(told)
        self._forked.append((pid, tell))

    @property
    def _closed(self) -> bool:
        """Whether the last error means that the loader is closed, or hangs: further calls would give the same error."""
        return bool({"LoaderClosed", "LoaderTimeout"} & set(self.events[-1].names))

    def finish(self) -> None:
        """End the consumer: check the batches that it hoarded, and drop all references."""
        LET_GO.set()
        for _, limits in self._limits:
            limits.close()
        for event, batch in self._held:
            if self._read(batch) != event:
                self.problems.append(f"batch {list(event.indices)} changed while it was held")
        self._held.clear()
        self._last = None
        for pid, tell in self._forked:
            os.write(tell, b"!")
            os.close(tell)
            self._reap(pid)
        self._forked.clear()
        for thread in self._threads:
            thread.join(FORKED_S)
            if thread.is_alive():
                self.problems.append(f"{thread.name} never came back")

    def _reap(self, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        try:
            if not select.select([pidfd], [], [], FORKED_S)[0]:
                self.problems.append("a forked child of the trainer hangs")
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code:
            self.problems.append(f"a forked child of the trainer saw its batch change, or failed (exit code {code})")

    def _elsewhere(self, function: Callable[[], object]) -> None:
        thread = threading.Thread(target=function, name="close from elsewhere", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---------------------------------------------------------------------------------------- sync

    def run_sync(self, loader: Any) -> None:
        """All epochs of a `DataLoader`."""
        for _ in self._epochs(loader):
            batches = iter(loader)
            while not self._endless:
                if self.leaves_now and not self._leave_sync(loader):
                    return
                self.strike()
                try:
                    self.take(next(batches))
                except StopIteration:
                    self.events.append(Event("end"))
                    break
                except Exception as error:
                    self.fail(error)
                    if self._closed:
                        return

    def _leave_sync(self, loader: Any) -> bool:
        """Leave in the case's way. Returns whether the loop continues, to record the events after it."""
        how = self.case.leave
        if how == "die":
            self.strike()
            raise Died
        if how == "close":
            self.strike()
            loader.close()
        elif how == "close elsewhere":
            self._elsewhere(loader.close)
        elif how == "interrupt":
            self._elsewhere(lambda: os.kill(os.getpid(), signal.SIGINT))
        elif how == "resume":
            self.state = json.dumps(loader.state_dict())
        return how not in ("break", "resume")

    # ---------------------------------------------------------------------------------------- async

    async def run_async(self, loader: Any) -> None:
        """All epochs of an `AsyncDataLoader`."""
        try:
            await self._run_epochs(loader)
        finally:
            if self._closing is not None:
                await asyncio.wrap_future(self._closing)
                self._closing = None

    async def _run_epochs(self, loader: Any) -> None:
        for _ in self._epochs(loader):
            batches = aiter(loader)
            while not self._endless:
                if self.leaves_now and not await self._leave_async(loader):
                    return
                cancels = self.strike()
                try:
                    batch = await (_cancelled(batches, cancels[0].number) if cancels else anext(batches))
                    if batch is not None:
                        self.take(batch)
                        del batch
                except StopAsyncIteration:
                    self.events.append(Event("end"))
                    break
                except Exception as error:
                    self.fail(error)
                    if self._closed:
                        return

    async def _leave_async(self, loader: Any) -> bool:
        how = self.case.leave
        if how == "die":
            self.strike()
            raise Died
        if how == "close":
            self.strike()
            await loader.aclose()
        elif how == "close elsewhere":
            loop = asyncio.get_running_loop()

            def close() -> None:
                self._closing = asyncio.run_coroutine_threadsafe(loader.aclose(), loop)

            thread = threading.Thread(target=close, name="close from elsewhere")
            thread.start()
            thread.join()
        elif how == "resume":
            self.state = json.dumps(loader.state_dict())
        return how not in ("break", "resume")


async def _cancelled(batches: Any, way: int) -> Any:
    """Ask for a batch and cancel the request. Returns the batch if it came nevertheless, else None."""

    async def take() -> Any:
        return await anext(batches)

    if way == 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0):
                return await anext(batches)
        return None
    if way == 1:
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(take(), 0.001)
        return None
    task = asyncio.create_task(take())
    for _ in range(way - 2):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        return await task
    return None
