"""What an epoch waits for, in words: for the error that says that it waited too long.

Data path: beside the pipeline, in its loop's thread; only when there is something to explain.
"""

from __future__ import annotations

import textwrap

from asyncloader.errors import shortened
from asyncloader.events import bare_index
from asyncloader.scheduler import Scheduler
from asyncloader.workers import stacks
from asyncloader.workers.pool import WorkerPool

__all__ = ["report"]

_SECONDS = 1.0


async def report(pool: WorkerPool, scheduler: Scheduler) -> str:
    """The oldest task, and each worker: its state, its tasks, its ring, and the Python stacks of its threads."""
    processes = list(pool.processes)  # others may be in their places when these have answered
    alive = [process for process in processes if not process.released]
    lines = [_head(scheduler)]  # before the signal, which may end what a worker waits for
    answers = await stacks.ask([stacks.Target(p.pid, p.death_fd, p.stacks) for p in alive], _SECONDS)
    found = {process.worker_id: answer for process, answer in zip(alive, answers, strict=True)}
    for process in processes:
        worker = process.worker_id
        if process.released or worker not in found:
            lines.append(f"worker {worker} (pid {process.pid}) has died and is being replaced")
            continue
        state, text = found[worker]
        at = "" if process.started else ", still at its start-up code"
        lines.append(
            f"worker {worker} (pid {process.pid}) is {state}{at}; "
            f"{scheduler.unanswered(worker)} tasks unanswered; ring: {pool.rings[worker].ring or 'none yet'}"
        )
        lines.append(textwrap.indent(stacks.worker_calls(text), "    "))
        process.stacks.clear()  # they are not its last words
    return "\n".join(lines)


def _head(scheduler: Scheduler) -> str:
    head = scheduler.head
    if head is None:
        return "No worker has a task that is waited for: the sampler, or what comes after the workers, takes that long."
    task, worker = head
    what = "the next batch of its stream" if task.index is None else f"indices {shortened(bare_index(task.index))}"
    return f"Waiting for task {task.seq} at worker {worker}: {what}."
