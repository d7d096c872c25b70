"""Reads this rank's share of a graph, with seeds that all ranks share, and ends when the first rank has no more items.

Data path: graph -> [distributed: sharding, fullsync] -> DataLoader2, or `MultiProcessingReadingService`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from torch.utils.data.graph_settings import apply_sharding

from asyncloader.dataloader2.graph.settings import set_graph_random_seed
from asyncloader.dataloader2.graph.utils import DataPipe, end_with
from asyncloader.dataloader2.random.distributed import dist_share_seed
from asyncloader.dataloader2.random.seed_generator import SeedGenerator
from asyncloader.dataloader2.services.interface import ReadingServiceInterface, shutdown_parts, with_threads
from asyncloader.dataloader2.utils.worker import Change


class DistributedReadingService(ReadingServiceInterface):
    """Reads one rank's part: `sharding_filter` keeps its share, `fullsync` at the end has all ranks end together.

    Args:
        timeout: seconds to wait for other ranks; default 1800.

    Raises:
        RuntimeError: this torch has no `torch.distributed`, or, at the first ``iter()``, it is not initialized.
    """

    def __init__(self, timeout: int = 1800) -> None:
        if not dist.is_available():
            raise RuntimeError("Torch Distributed is required to be available")
        self._timeout = timeout
        self._group: Any = None
        self._datapipe: DataPipe | None = None

    def initialize(self, datapipe: DataPipe) -> DataPipe:
        """Share the graph among the ranks. All ranks must call it: they make a group over gloo."""
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("Torch Distributed is required to be initialized")
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
        apply_sharding(datapipe, dist.get_world_size(), dist.get_rank(), SHARDING_PRIORITIES.DISTRIBUTED)
        self._datapipe = end_with(datapipe, "fullsync", self._timeout)
        self._with_threads = with_threads(self._datapipe)  # here, as `PausableReadingService` does, not in `finalize`
        return self._datapipe

    def initialize_iteration(self, seed_generator: SeedGenerator, iter_reset_fn: Change | None = None) -> Change | None:
        """Seed the graph. All ranks must call it: they get rank 0's seed."""
        assert self._datapipe is not None
        # The shared stream is the same in all ranks, and each rank has its own other stream.
        seed = dist_share_seed(seed_generator.generate_shared_seed(), self._group)
        seed_generator.seed(seed)
        seed_generator.spawn(dist.get_rank(), inplace=True)
        set_graph_random_seed(self._datapipe, seed_generator)
        return iter_reset_fn

    def _read_by(self) -> str:
        return f"{type(self).__name__} of {dist.get_world_size()} ranks"

    def finalize(self) -> None:
        """End the graph's threads, then the process group. Idempotent."""
        datapipe, self._datapipe = getattr(self, "_datapipe", None), None
        if datapipe is not None:
            shutdown_parts(self._with_threads)
        group, self._group = getattr(self, "_group", None), None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
