"""Describes the task that an epoch waits for, and each worker with the stacks of its threads.

Data path: none; where `timeout` has passed.
"""

from __future__ import annotations

import textwrap

from asyncloader.base.events import (
    bare_index,
)
from asyncloader.epoch.scheduler import Scheduler
from asyncloader.errors import shortened
from asyncloader.workers import stacks
from asyncloader.workers.pool import WorkerPool

_SECONDS = 1.0


async def report(pool: WorkerPool, scheduler: Scheduler) -> str:
    """Describe the oldest task, and each worker: its state, tasks, ring, and the Python stacks of its threads."""
    # Copies: a worker may be replaced, or given up, while the answers are awaited.
    processes, rings = list(pool.processes), list(pool.rings)
    lines = [_head(scheduler)]  # before the signal, which may interrupt a worker's system call
    found = await pool.look(processes, _SECONDS)
    for process, manager in zip(processes, rings, strict=True):
        worker = process.worker_id
        if process.released or worker not in found:
            replaced = scheduler.replaces(worker) or scheduler.unanswered(worker)
            then = " and is being replaced" if replaced else ""
            lines.append(f"worker {worker} ({process.place}) has ended{then}")
            continue
        state, text = found[worker]
        at = "" if process.started else ", still at its start-up code"
        lines.append(
            f"worker {worker} ({process.place}) is {state}{at}; "
            f"{scheduler.unanswered(worker)} tasks unanswered; ring: {manager.ring or 'none yet'}"
        )
        lines.append(textwrap.indent(stacks.worker_calls(text), "    "))
    lines.append(_advice(scheduler))
    return "\n".join(lines)


def _advice(scheduler: Scheduler) -> str:
    if scheduler.head is None:
        return "Look at the sampler. If it is only slow, raise timeout."
    task, worker = scheduler.head
    return f"See above in which call worker {worker} is with task {task.seq}. If it is only slow, raise timeout."


def _head(scheduler: Scheduler) -> str:
    head = scheduler.head
    if head is None:
        return "No worker has a pending task: the sampler, or a stage after the workers, takes that long."
    task, worker = head
    if not scheduler.iterable:
        what = f"indices {shortened(bare_index(task.index))}"
    else:
        what = "the next batch of " + ("its stream" if task.index is None else f"stream {task.index}")
    return f"Waiting for task {task.seq} at worker {worker}: {what}."
