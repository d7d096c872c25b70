"""Says which worker a function runs in.

Data path: none; an argument of `worker_init_fn` and `worker_reset_fn`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["WorkerInfo"]


@dataclass(frozen=True)
class WorkerInfo:
    """A worker among the workers of one reading service.

    Attributes:
        num_workers: how many there are.
        worker_id: its number, from 0.
    """

    num_workers: int
    worker_id: int
