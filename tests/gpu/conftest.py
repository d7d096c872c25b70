from __future__ import annotations

import pytest
import torch

from asyncloader import DataLoader
from tests.helpers.datasets import Numbers


@pytest.fixture(scope="session", autouse=True)
def cuda_begun() -> None:
    """What CUDA opens for the process when it is first used (descriptors, mappings) is no test's leak."""
    if not torch.cuda.is_available():
        return
    torch.zeros(1).pin_memory().to("cuda", non_blocking=True).item()
    for _ in DataLoader(Numbers(4), num_workers=1, device="cuda"):
        pass
    torch.cuda.synchronize()
