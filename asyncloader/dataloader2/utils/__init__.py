"""Describes a worker, shares a graph among workers, and begins the epochs in it.

Data path: none. Names as in `torchdata.dataloader2.utils`.
"""

from __future__ import annotations

from asyncloader.dataloader2.utils.worker import WorkerInfo

__all__ = ["WorkerInfo"]
