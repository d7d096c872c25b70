"""`WorkerInfo`, which the functions of a reading service get.

Data path: none. Names as in `torchdata.dataloader2.utils`.
"""

from __future__ import annotations

from asyncloader.dataloader2.utils.worker import WorkerInfo

__all__ = ["WorkerInfo"]
