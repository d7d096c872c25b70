"""Offers all reading services in one module, under the name that it has in torchdata.

Data path: none.
"""

from __future__ import annotations

from asyncloader.dataloader2.services.distributed import DistributedReadingService
from asyncloader.dataloader2.services.interface import (
    CheckpointableReadingServiceInterface,
    InProcessReadingService,
    ReadingServiceInterface,
    SequentialReadingService,
)
from asyncloader.dataloader2.services.multiprocess import (
    MultiProcessingReadingService,
    PrototypeMultiProcessingReadingService,
)

__all__ = [
    "CheckpointableReadingServiceInterface",
    "DistributedReadingService",
    "InProcessReadingService",
    "MultiProcessingReadingService",
    "PrototypeMultiProcessingReadingService",
    "ReadingServiceInterface",
    "SequentialReadingService",
]
