"""What a node says of the end of a worker's process.

Data path: node -> [death_report] -> connection -> loader.
"""

from __future__ import annotations

from typing import NamedTuple


class DeathReport(NamedTuple):
    """What a loader is told of a process that died.

    Attributes:
        pid: its process id.
        exitcode: as of `WorkerDied`.
        reason: as of `WorkerDied`.
        trace: as of `WorkerDied`.
        blamed: whether it died at this lane's task, and at no other's.
        shared: whether it may have been at another lane's task, too.
    """

    pid: int
    exitcode: int | None
    reason: str
    trace: str
    blamed: bool
    shared: bool
