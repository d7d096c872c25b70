"""One case, in a process of its own: an undisturbed run, the run, the comparison, and the check for leaks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from tests.conftest import World, _wait_for_endings
from tests.stress.checks import Epoch, compare, draws_differ, expected, placed_faults
from tests.stress.consumer import Consumer, Died, Event
from tests.stress.faults import plan_of
from tests.stress.schedule import KILLING, START, Case
from tests.stress.workloads import Maker, make_dataset, make_loader, order_of

HEALTHY = ("calm", "bad samples", "cancelled")
"""Scenarios in which no slot is retired, as far as no worker dies: no batch needs to be copied out."""


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Run the case; a report that JSON can carry. Its `problems` are empty when all was well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))  # libuv opens a pair of descriptors for the process when it is first used
    begin = time.monotonic()
    problems: list[str] = []
    with _noises(problems):
        orders, undisturbed = _undisturbed(case, folder / "undisturbed", problems)
        run = _Run(case, orders, folder)
        gc.collect()
        before = World.now()
        run.go()
        problems += run.consumer.problems + _leaks(before)
    problems += _differences(case, run, orders, undisturbed)
    return {
        "problems": problems,
        "struck": run.plan.struck((*KILLING, "raise", "starve")) + run.consumer.struck + run.consumer.befallen,
        "restarts": run.facts.get("data/worker_restarts", 0.0),
        "batches": sum(event.kind == "batch" for events in run.consumer.epochs for event in events),
        "seconds": time.monotonic() - begin,
        "warnings": run.warnings,
    }


@contextlib.contextmanager
def _noises(found: list[str]) -> Generator[None]:
    """Errors that no caller can catch: in finalizers, threads, and callbacks of an event loop."""

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(f"logged: {self.format(record)[:2000]}")

    log = Log(logging.ERROR)
    logging.getLogger().addHandler(log)
    sys.unraisablehook = lambda args: found.append(f"unraisable: {args.exc_value!r} in {args.object!r}")
    threading.excepthook = lambda args: found.append(f"in a thread: {args.exc_value!r}")
    try:
        yield
    finally:
        logging.getLogger().removeHandler(log)


# ------------------------------------------------------------------------------------------- the undisturbed run


def _undisturbed(case: Case, folder: Path, problems: list[str]) -> tuple[list[list[int]], list[list[Event]]]:
    """The order of each epoch of a map dataset, and the batches of an undisturbed run of a seeded loader."""
    if not case.seeded:
        return ([] if case.streams else [order_of(case)] * case.epochs), []
    folder.mkdir()
    changed: dict[str, Any] = {"loader": "sync", "method": "fork", "consumer": "fast", "persistent": False}
    orders: list[list[int]] = []
    if not case.streams:
        orders = _orders(replace(case, **changed, faults=()), folder)
        wrong = [order for order in orders if sorted(order) != list(range(case.length))]
        problems += [f"the undisturbed order is no permutation: {order}" for order in wrong]
    faults = tuple(case.having("raise"))
    calm = replace(
        case, **changed, faults=faults, leave="exhaust", ballast=0, worker_memory_limit=None, max_skipped_samples=None
    )
    plan = plan_of(str(folder), placed_faults(calm, orders))
    dataset = make_dataset(calm, plan)
    consumer = Consumer(calm, dataset, folder)
    _inline(calm, consumer, dataset)
    if calm.on_error != "refill":
        for number, epoch in enumerate(expected(calm, orders)):
            problems += compare(replace(epoch, ordered=True), consumer.epochs[number], f"undisturbed epoch {number}")
    return orders, consumer.epochs


def _orders(case: Case, folder: Path) -> list[list[int]]:
    calm = replace(case, loader="sync", leave="exhaust", ballast=0, lag=0, on_error="raise")
    dataset = make_dataset(calm, plan_of(str(folder), []))
    consumer = Consumer(calm, dataset, folder)
    _inline(calm, consumer, dataset)
    (folder / "second epoch").unlink(missing_ok=True)
    return [[index for event in events for index in event.indices] for events in consumer.epochs]


def _inline(case: Case, consumer: Consumer, dataset: Any) -> None:
    """Run the epochs without workers, unless the dataset is a stream."""
    changed: dict[str, Any] = {"in_order": True, "timeout": 0}
    if not case.streams:
        changed |= {"num_workers": 0, "prefetch_factor": None, "multiprocessing_context": None, "workers": None}
        changed |= {"persistent_workers": False}
        for name in ("worker_timeout", "max_worker_restarts", "worker_memory_limit"):
            changed[name] = None
    with make_loader(case, dataset, **changed) as loader:
        consumer.run_sync(loader)


# ------------------------------------------------------------------------------------------- the run


class _Run:
    """The case itself."""

    def __init__(self, case: Case, orders: list[list[int]], folder: Path) -> None:
        self.case = case
        self.plan = plan_of(str(folder), placed_faults(case, orders))
        self.consumer = Consumer(case, Maker(case, self.plan), folder)
        self.facts: dict[str, float] = {}
        self.bad: list[Any] = []
        self.warnings: list[str] = []
        self._drops = case.leave in ("die", "break") or case.seed % 3 == 0

    def go(self) -> None:
        """Run to the end, whatever it is."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            # Python 3.12 and later warn of each fork beside a thread.
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            try:
                if self.case.leave == "die":
                    thread = threading.Thread(target=self._guarded, name="consumer")
                    thread.start()
                    thread.join()
                else:
                    self._guarded()
            finally:
                self.consumer.finish()
        self.warnings = [f"{w.category.__name__}: {w.message}" for w in caught]

    def _guarded(self) -> None:
        try:
            self._sync() if self.case.loader == "sync" else self._async()
        except (Died, KeyboardInterrupt):
            pass
        except BaseException:
            self.consumer.problems.append(f"the runner failed: {traceback.format_exc()}")

    def _sync(self) -> None:
        self._one_sync(self.case)
        if self.consumer.state is not None:
            self._one_sync(self._next)

    @property
    def _next(self) -> Case:
        """The case of the loader that resumes."""
        case = self.case
        return replace(case, method=case.goes_on or case.method, workers=case.goes_on_with or case.workers)

    def _one_sync(self, case: Case) -> None:
        loader = make_loader(case, make_dataset(self.case, self.plan))
        try:
            self.consumer.run_sync(loader)
        finally:
            self._look(loader)
            if not self._drops:
                loader.close()

    def _async(self) -> None:
        factory = uvloop.new_event_loop if self.case.loader == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        await self._one_async(self.case)
        if self.consumer.state is not None:
            await self._one_async(self._next)

    async def _one_async(self, case: Case) -> None:
        loader = make_loader(case, make_dataset(self.case, self.plan))
        try:
            await self.consumer.run_async(loader)
        finally:
            self._look(loader)
            if not self._drops:
                await loader.aclose()
                tasks = asyncio.all_tasks() - {asyncio.current_task()}
                self.consumer.problems += [f"pending: {task!r}" for task in tasks]

    def _look(self, loader: Any) -> None:
        self.facts = loader.stats()
        self.bad = [sample.index for sample in loader.skipped_samples]


def _leaks(before: World) -> list[str]:
    gc.collect()
    if World.now().since(before):
        _wait_for_endings(before)
        gc.collect()
    return [f"left behind: {thing}" for thing in World.now().since(before)]


def _differences(case: Case, run: _Run, orders: list[list[int]], undisturbed: list[list[Event]]) -> list[str]:
    problems: list[str] = []
    epochs = expected(case, orders, undisturbed)
    if len(run.consumer.epochs) != len(epochs) and case.leave == "exhaust":
        problems.append(f"{len(run.consumer.epochs)} of {len(epochs)} epochs began")
    for number, (epoch, events) in enumerate(zip(epochs, run.consumer.epochs, strict=False)):
        problems += compare(epoch, events, f"epoch {number}")
        if case.seeded:
            problems += draws_differ(events, undisturbed[number], f"epoch {number}")
    return problems + _told(case, run, epochs[-1])


def _told(case: Case, run: _Run, last: Epoch) -> list[str]:
    """The differences between the loader's own counts and the events of the case."""
    problems: list[str] = []
    own, deaths = run.plan.struck(KILLING), run.plan.struck(KILLING) + run.consumer.struck
    restarts = run.facts.get("data/worker_restarts", 0.0)
    patient = case.worker_timeout is None or case.worker_timeout > 10  # else a busy machine may cost a worker its life
    if restarts > deaths and patient and not case.having("starve"):
        problems.append(f"{restarts:.0f} restarts, but only {deaths} workers were struck")
    if restarts < own and case.scenario == "heal" and not any(fault.at == START for fault in case.faults):
        problems.append(f"{restarts:.0f} restarts, but {own} workers died over a task")
    copies = run.facts.get("data/ring_copies", 0.0)
    if copies and case.scenario in HEALTHY and not deaths and case.consumer != "hoarding":
        problems.append(f"{copies:.0f} batches were copied out, although the consumer let go of every one")
    lost = [text for text in run.warnings if "random numbers begin anew" in text]
    if bool(restarts and not case.seeded and case.leave == "exhaust") != bool(lost) and case.leave == "exhaust":
        problems.append(
            f"{restarts:.0f} restarts {'with' if case.seeded else 'without'} seed=, and the warnings {lost}"
        )
    replaced = case.max_worker_restarts or (case.max_worker_restarts is None and case.seeded)
    kinds = {"threads" if method == "threads" else "processes" for method in (case.method, case.goes_on or case.method)}
    due = [
        *(f"worker {kind}" for kind in kinds),
        *(["worker_timeout="] if case.worker_timeout and not replaced else []),
    ]
    others = [text for text in run.warnings if text not in lost and not any(each in text for each in due)]
    problems += [f"warned: {text}" for text in others]
    if last.bad is not None and sorted(run.bad) != last.bad:
        problems.append(f"loader.skipped_samples has {sorted(run.bad)}, not {last.bad}")
    return problems
