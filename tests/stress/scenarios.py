"""Seed -> case. Pure: the same seed gives the same case on every machine.

A scenario takes a workload, and adds the faults and options that make its subject.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import replace

from tests.stress.draw import deaths, healing, in_threads, killing, own_deaths, task, workload
from tests.stress.schedule import SLOT_BYTES, START, Case, Fault

CANCELS = 4  # ways to cancel that `consumer.py` knows
RAISED = 3  # kinds of errors that `faults.py` knows to raise


NOT_IN_THREADS = ("hail", "starved worker", "retired")
"""Scenarios that are about processes: they are killed, and have limits of their own."""


def draw(seed: int, scenario: str | None = None, *, threads: bool = False) -> Case:
    """The case of this seed; of this scenario, if one is given, and with worker `threads`, where the scenario can."""
    rng = random.Random(f"asyncloader chaos {seed}")
    names = list(SCENARIOS)
    drawn = rng.choices(names, [SCENARIOS[name][0] for name in names])[0]
    name = scenario or drawn
    case = SCENARIOS[name][1](rng, workload(rng, seed, name))
    # From a generator of its own: the other cases stay as they are.
    rng = random.Random(f"worker threads {seed}")
    return in_threads(rng, case) if (rng.random() < 0.2 or threads) and name not in NOT_IN_THREADS else case


def _calm(rng: random.Random, case: Case) -> Case:
    """Nothing happens."""
    return case


def _heal(rng: random.Random, case: Case) -> Case:
    """Workers die, stop or hang, and are replaced."""
    struck = deaths(rng, case)
    if rng.random() < 0.15:  # before the first task
        struck.append(Fault("exit", START, worker=rng.randrange(case.workers), number=rng.choice([0, 1])))
    return healing(rng, case, struck)


def _no_restarts(rng: random.Random, case: Case) -> Case:
    """A death, and no restart that could heal it."""
    death = rng.choice(own_deaths(rng, case, 3))
    kind, number = killing(rng, stops=False)
    case = replace(case, faults=(replace(death, kind=kind, number=number),))
    if case.stateless and rng.random() < 0.5:  # restarts would not help: it cannot be resumed
        return replace(case, max_worker_restarts=5)
    return replace(case, seeded=False, max_worker_restarts=rng.choice([None, 0]))


def _one_restart(rng: random.Random, case: Case) -> Case:
    """One worker dies more often than it may."""
    case = replace(case, workers=1, shares=(sum(case.shares),) if case.streams else (), epochs=1, persistent=False)
    allowed = rng.choice([1, 2])
    faults = own_deaths(rng, case, 4)
    faults = [replace(f, kind="kill", number=int(signal.SIGKILL)) for f in faults]
    return replace(healing(rng, case, faults), max_worker_restarts=allowed)


def _poison(rng: random.Random, case: Case) -> Case:
    """A sample that kills every worker that touches it."""
    death = replace(rng.choice(own_deaths(rng, case, 3)), strikes=rng.choice([0, 0, 3]))
    case = healing(rng, case, [death] * 3)
    return replace(case, faults=(death,), max_worker_restarts=rng.choice([3, 6]))


def _poison_skipped(rng: random.Random, case: Case) -> Case:
    """A sample that kills every worker that touches it, and a loader that goes on without it."""
    case = replace(case, workload=rng.choice(["map", "async"]), shares=(), length=case.length or sum(case.shares))
    how = rng.choice(["skip", "skip", "callable"])
    if how == "callable" and case.collate == "default":
        case = replace(case, collate="cat")
    return replace(_poison(rng, case), on_error=how)


def _bad_samples(rng: random.Random, case: Case) -> Case:
    """Samples that raise, and perhaps a death beside them."""
    how = rng.choice(["raise", "skip", "skip", "callable", "refill"])
    if how in ("skip", "callable", "refill") and case.streams:
        case = replace(case, workload=rng.choice(["map", "async"]), shares=(), length=sum(case.shares))
    if case.streams:  # a plain generator ends with its first error: nothing to be checked beyond it
        case = replace(case, workload="stateful")
    case = replace(case, on_error=how, seeded=case.seeded or how == "refill")
    if how == "callable" and case.collate == "default":  # which stacks samples of one size only
        case = replace(case, collate="cat")
    total = sum(case.shares) if case.streams else case.length
    bad = rng.sample(range(total), min(total - 1, rng.choice([1, 2, 5])))
    faults = [_place(case, place, Fault("raise", 0, 0, 0, 0, rng.randrange(RAISED))) for place in bad]
    if case.epochs == 2:
        faults += [replace(fault, epoch=1) for fault in faults]
    case = replace(case, faults=tuple(faults))
    taken = {task(case, fault) for fault in faults}
    struck = [f for f in own_deaths(rng, case, 1) if task(case, f) not in taken]
    if not struck or rng.random() < 0.5:
        return replace(case, allow_replay=case.stateless)
    return healing(rng, case, struck)


def _place(case: Case, place: int, fault: Fault) -> Fault:
    """The fault at sample number `place` of all that there are."""
    for worker, share in enumerate(case.shares):
        if place < share:
            return replace(fault, at=place, worker=worker)
        place -= share
    return replace(fault, at=place)


def _too_many(rng: random.Random, case: Case) -> Case:
    """A rotten dataset: more samples raise than may."""
    case = replace(_bad_samples(rng, replace(case, epochs=1, persistent=False)), on_error="skip")
    if case.streams:
        case = replace(case, workload="map", shares=(), length=sum(case.shares))
    bad = [Fault("raise", place) for place in rng.sample(range(case.length), min(case.length, 8))]
    return replace(case, faults=tuple(replace(f, strikes=0) for f in bad), max_skipped_samples=rng.choice([0, 1, 3]))


def _starved(rng: random.Random, case: Case) -> Case:
    """A worker that gets no new segments and no pages for its slots any more."""
    case = replace(case, collate="cat", sizes=rng.choice(["mixed", "growing"]), allow_replay=False)
    case = replace(case, sample_bytes=max(case.sample_bytes, 3 * SLOT_BYTES // case.batch_size))
    death = rng.choice(own_deaths(rng, case, 1))
    return replace(case, faults=(replace(death, kind="starve", number=rng.choice([0, SLOT_BYTES, -1])),))


def _short(rng: random.Random, case: Case) -> Case:
    """A main process without descriptors, or without memory for larger rings, for some batches."""
    kind = rng.choice(["descriptors", "disk"])
    if kind == "disk":
        case = replace(case, collate="cat", sizes="growing", ring_bytes=None, sample_bytes=3 * SLOT_BYTES)
        case = replace(case, sample_bytes=max(1, case.sample_bytes // case.batch_size))
    at = rng.randint(0, case.batches // 2)
    return replace(case, faults=(Fault(kind, at, 0, number=rng.choice([2, 5, 100])),))


def _cancelled(rng: random.Random, case: Case) -> Case:
    """`__anext__` cancelled at many points, and perhaps a death beside it."""
    case = replace(case, loader=rng.choice(["asyncio", "uvloop"]))
    points = sorted([0, *rng.sample(range(case.batches), min(case.batches, rng.randint(2, 10)))])
    cancels = [
        Fault("cancel", at, epoch, number=rng.randrange(CANCELS)) for epoch in range(case.epochs) for at in points
    ]
    case = replace(case, faults=tuple(cancels))
    return healing(rng, case, deaths(rng, case)) if rng.random() < 0.5 else case


def _left(rng: random.Random, case: Case) -> Case:
    """A consumer that leaves before the end in some way, perhaps while workers die."""
    how = rng.choice(["die", "break", "close", "close elsewhere", "interrupt"])
    after = rng.randint(0, max(0, case.batches - 1))
    case = replace(case, leave=how, leave_after=after)
    if rng.random() < 0.5:
        return case
    struck = deaths(rng, case)
    if rng.random() < 0.5:  # at the same moment: while the death is being handled
        struck = [Fault("kill all workers", after, case.epochs - 1, number=int(signal.SIGKILL))]
    return healing(rng, case, struck)


def _resumed(rng: random.Random, case: Case) -> Case:
    """A state is saved in the middle, and another loader goes on from there; workers of either may die."""
    after = rng.randint(0, case.batches - 1)
    replays = case.stateless
    case = replace(case, seeded=True, leave="resume", leave_after=after, allow_replay=replays)
    return healing(rng, case, deaths(rng, case)) if rng.random() < 0.6 else case


def _retired(rng: random.Random, case: Case) -> Case:
    """Workers that grow with every sample, and are retired in time."""
    case = replace(case, ballast=2 << 20, worker_memory_limit=rng.choice([8, 16, 30]) << 20)
    case = replace(case, method="fork", allow_replay=case.stateless)
    return replace(case, max_worker_restarts=rng.choice([None, 1]))


def _forked(rng: random.Random, case: Case) -> Case:
    """A trainer that forks while batches are held, perhaps while workers die."""
    at = rng.randint(1, max(1, case.batches - 2))
    again = min(case.batches - 1, at + rng.randint(1, 5))
    case = replace(case, faults=(Fault("fork", at), Fault("fork", again)))
    return healing(rng, case, deaths(rng, case)) if rng.random() < 0.5 else case


def _hail(rng: random.Random, case: Case) -> Case:
    """Worker after worker is killed from outside, replacements that have just begun among them."""
    points = sorted(rng.sample(range(case.batches), min(case.batches, rng.randint(4, 12))))
    numbers = [int(signal.SIGKILL), int(signal.SIGTERM)]
    hail = [
        Fault("kill worker", at, epoch, rng.randrange(4), 1, rng.choice(numbers))
        for epoch in range(case.epochs)
        for at in points
    ]
    return replace(healing(rng, case, hail), max_worker_restarts=50)


def _timed_out(rng: random.Random, case: Case) -> Case:
    """A worker that hangs, and a loader that only reports it."""
    place = rng.choice(own_deaths(rng, replace(case, epochs=1), 1))
    fault = replace(place, kind=rng.choice(["stop", "hang", "hang in C"]), number=0)
    case = replace(case, faults=(fault,), method="fork", epochs=1, persistent=False)
    return replace(case, timeout=3.0, worker_timeout=None, allow_replay=case.stateless)


SCENARIOS: dict[str, tuple[int, Callable[[random.Random, Case], Case]]] = {
    "calm": (4, _calm),
    "heal": (40, _heal),
    "hail": (6, _hail),
    "timed out": (3, _timed_out),
    "no restarts": (4, _no_restarts),
    "one restart": (4, _one_restart),
    "poison": (5, _poison),
    "poison skipped": (3, _poison_skipped),
    "bad samples": (10, _bad_samples),
    "too many bad samples": (2, _too_many),
    "starved worker": (3, _starved),
    "short of something": (4, _short),
    "cancelled": (8, _cancelled),
    "left": (9, _left),
    "resumed": (5, _resumed),
    "retired": (4, _retired),
    "forked": (7, _forked),
}
"""How often each is drawn, and the function that makes it."""
