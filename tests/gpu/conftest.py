from __future__ import annotations

import pytest
import torch

from asyncloader import DataLoader
from tests.helpers.datasets import Numbers


@pytest.fixture(scope="session", autouse=True)
def cuda_begun() -> None:
    """Let CUDA open its descriptors and mappings of the process first, which no test leaks."""
    if not torch.cuda.is_available():
        return
    torch.zeros(1).pin_memory().to("cuda", non_blocking=True).item()
    for _ in DataLoader(Numbers(4), num_workers=1, device="cuda"):
        pass
    torch.cuda.synchronize()
