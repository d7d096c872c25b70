"""Draws the parts of cases: workloads, and faults that may strike them. Pure; `scenarios.py` puts them together.

A case's batches must be known beforehand, so faults are drawn under two rules. A task that kills workers may be
quarantined, so no two faults may be blamed on the same task unless the case is about that: faults that kill are as far
apart as there are tasks in flight. And a case that recovers must have enough restarts for all faults.
"""

from __future__ import annotations

import random
import signal
from dataclasses import replace

from tests.stress.schedule import KILLING, SLOT_BYTES, START, Case, Fault

SIGNALS = [
    signal.SIGKILL,
    signal.SIGKILL,
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGTERM,
]
WORKER_TIMEOUT_S = 3.0  # for faults that need a limit: far above the time of a sample on a busy machine


# ------------------------------------------------------------------------------------------- the workload


def workload(rng: random.Random, seed: int, scenario: str) -> Case:
    kind = rng.choice(["map"] * 6 + ["async"] * 3 + ["stream", "stream", "async stream"] + ["stateful"] * 3)
    method = rng.choices(["fork", "forkserver", "spawn"], [94, 4, 2])[0]
    workers = rng.randint(1, 4) if method == "fork" else rng.randint(1, 2)
    batch_size = rng.choice([1, 1, 2, 3, 4, 6])
    batches = rng.randint(12, 40)
    streams = kind not in ("map", "async")
    seeded = rng.random() < 0.6
    collate = rng.choice(["default", "default", "cat", "cat", "objects"])
    sample_bytes = _sample_bytes(rng, batch_size)
    epochs = rng.choice([1, 1, 2])
    return Case(
        seed=seed,
        scenario=scenario,
        workload=kind,
        loader=rng.choice(["sync", "sync", "asyncio", "uvloop"]),
        method=method,
        workers=workers,
        length=0 if streams else batches * batch_size - rng.randrange(batch_size),
        shares=_shares(rng, workers, batches * batch_size) if streams else (),
        batch_size=batch_size,
        prefetch=rng.choice([1, 2, 2, 3]),
        shuffle=not streams and rng.random() < 0.5,
        collate=collate,
        sizes="even" if collate == "default" else rng.choice(["even", "mixed", "growing"]),
        sample_bytes=0 if collate == "objects" else sample_bytes,
        ring_bytes=rng.choice([None, None, None, 256 * 1024, 2 << 20]),
        seeded=seeded,
        in_order=rng.random() < 0.85,
        persistent=epochs == 2 and rng.random() < 0.6,
        epochs=epochs,
        consumer=rng.choice(["fast", "fast", "slow", "hoarding"]),
        lag=rng.choice([0, 0, 3, 7]),
        reorder_window=rng.choice([0, 2, 4]),
        snapshot_every=rng.choice([1, 1, 2, 3]),
        worker_timeout=rng.choice([None, None, 30.0]),
    )


def _sample_bytes(rng: random.Random, batch_size: int) -> int:
    """From nothing to three slots' worth in a batch, with a liking for the edges."""
    in_batch = rng.choice(
        [0, 1, 1000, SLOT_BYTES // 2, SLOT_BYTES - 4096, SLOT_BYTES, SLOT_BYTES + 1, rng.randint(0, 3 * SLOT_BYTES)]
    )
    return -(-in_batch // batch_size)


def _shares(rng: random.Random, workers: int, samples: int) -> tuple[int, ...]:
    """Nearly even, or very uneven; one may be empty."""
    if rng.random() < 0.6:
        return tuple(samples // workers + rng.randint(0, 3) for _ in range(workers))
    cuts = sorted(rng.randint(0, samples) for _ in range(workers - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, samples], strict=True))


# ------------------------------------------------------------------------------------------- faults


def killing(rng: random.Random, *, stops: bool = True) -> tuple[str, int]:
    """A fault that ends a worker: kind and number."""
    rest = [6, 7, 7] if stops else [0, 0, 0]
    kind = rng.choices(["kill", "exit", "grandchild", "stop", "hang", "hang in C"], [55, 18, 7, *rest])[0]
    number = {"kill": int(rng.choice(SIGNALS)), "exit": rng.choice([0, 1, 7])}.get(kind, 0)
    return kind, number


def own_deaths(rng: random.Random, case: Case, most: int) -> list[Fault]:
    """Up to `most` faults by which workers end, at least one, no two of them within one task's reach."""
    found: list[Fault] = []
    apart = (case.in_flight + 1) * case.batch_size
    for epoch in range(case.epochs):
        if case.streams:
            for worker, share in enumerate(case.shares):
                places = range(0, share, (case.prefetch + 2) * case.batch_size)
                found += [_death(rng, place, epoch, worker, share) for place in places]
        else:
            found += [_death(rng, place, epoch, 0, case.length) for place in range(0, case.length, 2 * apart)]
    found = [fault for fault in found if fault.at >= 0]
    count = rng.randint(1, most)
    return sorted(rng.sample(found, min(count, len(found))), key=lambda fault: (fault.epoch, fault.at))


def _death(rng: random.Random, place: int, epoch: int, worker: int, end: int) -> Fault:
    kind, number = killing(rng)
    return Fault(kind, min(place + rng.choice([0, 0, 1, 2]), end - 1), epoch, worker, 1, number)


def _outside_deaths(rng: random.Random, case: Case) -> list[Fault]:
    """Workers that another process kills or stops, now and then all at once."""
    kind = rng.choices(["kill worker", "kill all workers", "stop worker"], [6, 2, 1])[0]
    at = rng.randint(0, max(0, case.batches - 2))
    if case.persistent and rng.random() < 0.3:
        return [Fault(kind, -1, 1, rng.randrange(case.workers), 1, int(signal.SIGKILL))]
    number = int(rng.choice(SIGNALS)) if kind != "stop worker" else 0
    fault = Fault(kind, at, rng.randrange(case.epochs), rng.randrange(case.workers), 1, number)
    later = at + 2 * case.in_flight + 2
    if case.in_order and later < case.batches - 1 and kind != "stop worker" and rng.random() < 0.3:
        return [fault, replace(fault, at=later)]
    return [fault]


def healing(rng: random.Random, case: Case, faults: list[Fault]) -> Case:
    """The case with these faults, and options by which it heals."""
    deaths = len(faults)
    enough = deaths + rng.choice([0, 0, 1, 5])
    given: int | None = max(1, enough)
    if case.seeded and deaths <= 3 and rng.random() < 0.5:
        given = None  # seeded mode's default: 3
    replays = case.stateless or rng.choice([False, False, True])
    timeout = case.worker_timeout
    if any(fault.kind in ("stop", "hang", "hang in C", "stop worker") for fault in faults):
        timeout = WORKER_TIMEOUT_S
    return replace(
        case, faults=(*case.faults, *faults), max_worker_restarts=given, allow_replay=replays, worker_timeout=timeout
    )


def deaths(rng: random.Random, case: Case) -> list[Fault]:
    return own_deaths(rng, case, 3) if rng.random() < 0.65 else _outside_deaths(rng, case)


def in_threads(rng: random.Random, case: Case) -> Case:
    """The case with worker threads, which end in one way only: a call hangs, and they are given up."""
    kept = tuple(fault for fault in case.faults if "worker" not in fault.kind and fault.at != START)
    lost = len(case.faults) - len(kept)
    if lost and not any(fault.kind in KILLING for fault in kept):
        kept += tuple(own_deaths(rng, case, lost))
    hangs = {id(fault): replace(fault, kind="hang in a thread", number=0) for fault in kept if fault.kind in KILLING}
    case = replace(
        case,
        method="threads",
        own_draws=True,
        ring_bytes=None,
        faults=tuple(hangs.get(id(fault), fault) for fault in kept),
        worker_timeout=WORKER_TIMEOUT_S if hangs and not case.timeout else case.worker_timeout,
    )
    if case.leave != "resume":
        return case
    method = rng.choice(["threads", "fork"])
    # A map dataset's state belongs to the loader, a stream's to its workers.
    case = replace(case, goes_on=method, goes_on_with=0 if case.streams else rng.randint(1, 4))
    return replace(case, method="fork") if method == "threads" and not hangs and rng.random() < 0.5 else case


def task(case: Case, fault: Fault) -> tuple[int, int, int]:
    """Epoch, worker and number of the task that makes the fault's sample."""
    return fault.epoch, fault.worker, fault.at // case.batch_size
