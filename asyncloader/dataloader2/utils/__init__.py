"""What a worker is told of itself, what begins its process and its epochs, and which part of a graph is dealt out.

Data path: none. Names as in `torchdata.dataloader2.utils`.
"""

from __future__ import annotations

from asyncloader.dataloader2.utils.worker import WorkerInfo, process_init_fn, process_reset_fn

__all__ = ["WorkerInfo", "process_init_fn", "process_reset_fn"]
