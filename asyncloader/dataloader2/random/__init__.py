"""The seeds of a graph: where they come from, and how workers and ranks share them.

Data path: none. Names as in `torchdata.dataloader2.random`.
"""

from __future__ import annotations

from asyncloader.dataloader2.random.distributed import dist_share_seed
from asyncloader.dataloader2.random.seed_generator import SeedGenerator

__all__ = ["SeedGenerator", "dist_share_seed"]
