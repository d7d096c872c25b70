"""What a worker is told of itself, and how a graph is searched for what one process must deal out.

Data path: none. Names as in `torchdata.dataloader2.utils`.
"""

from __future__ import annotations

from asyncloader.dataloader2.utils.worker import WorkerInfo

__all__ = ["WorkerInfo"]
