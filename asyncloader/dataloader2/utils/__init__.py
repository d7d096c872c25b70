"""What a worker is told of itself, and what begins its process and each of its epochs.

Data path: none. Names as in `torchdata.dataloader2.utils`.
"""

from __future__ import annotations

from asyncloader.dataloader2.utils.worker import WorkerInfo, process_init_fn, process_reset_fn

__all__ = ["WorkerInfo", "process_init_fn", "process_reset_fn"]
