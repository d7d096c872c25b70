"""All reading services under the one name that they have in torchdata.

Data path: none.
"""

from __future__ import annotations

from asyncloader.dataloader2.distributed import DistributedReadingService
from asyncloader.dataloader2.multiprocess import (
    MultiProcessingReadingService,
    PrototypeMultiProcessingReadingService,
)
from asyncloader.dataloader2.services import (
    CheckpointableReadingServiceInterface,
    InProcessReadingService,
    ReadingServiceInterface,
    SequentialReadingService,
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
