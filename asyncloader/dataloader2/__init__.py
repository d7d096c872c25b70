"""torchdata's DataLoader2 over this package's workers: graphs of datapipes, reading services, adapters, snapshots.

    from asyncloader.dataloader2 import DataLoader2, MultiProcessingReadingService

Data path: graph -> adapters -> reading service -> DataLoader2. Names as in `torchdata.dataloader2` 0.9. Importing this
package registers functional forms of datapipes that torch lacks; nothing else changes.
"""

from __future__ import annotations

from asyncloader.dataloader2.dataloader2 import DataLoader2, DataLoader2Iterator
from asyncloader.dataloader2.datapipes import register_forms
from asyncloader.dataloader2.error import PauseIteration
from asyncloader.dataloader2.reading_service import (
    CheckpointableReadingServiceInterface,
    DistributedReadingService,
    InProcessReadingService,
    MultiProcessingReadingService,
    PrototypeMultiProcessingReadingService,
    ReadingServiceInterface,
    SequentialReadingService,
)
from asyncloader.dataloader2.shuffle_spec import ShuffleSpec

__all__ = [
    "CheckpointableReadingServiceInterface",
    "DataLoader2",
    "DataLoader2Iterator",
    "DistributedReadingService",
    "InProcessReadingService",
    "MultiProcessingReadingService",
    "PauseIteration",
    "PrototypeMultiProcessingReadingService",
    "ReadingServiceInterface",
    "SequentialReadingService",
    "ShuffleSpec",
]

register_forms()
