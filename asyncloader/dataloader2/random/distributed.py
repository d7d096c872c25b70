"""Agrees with the other ranks on a seed: all use that of rank 0.

Data path: none. Once per epoch, before the seeds of the graph are set.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

_HALF = 1 << 63


def dist_share_seed(seed: int, process_group: dist.ProcessGroup | None = None) -> int:
    """Return rank 0's seed. All ranks must call it; it waits for rank 0.

    Args:
        seed: 0 to 2**64 - 1; only rank 0's matters.
        process_group: of a backend that moves CPU tensors; default None: the default group.
    """
    # Shifted by half the range: an int64 holds a 64-bit number only with a sign.
    shared = torch.tensor(seed - _HALF, dtype=torch.int64, device="cpu")
    dist.broadcast(shared, src=0, group=process_group)
    return int(shared.item()) + _HALF
