"""The benchmarks of random access: they run, and find wrong content. No speed is asserted."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch

from . import random_access


@pytest.mark.thorough
def test_ours_is_measured_and_verified(tmp_path: Path) -> None:
    """Ours alone: the peers are not installed where tests run."""
    random_access.write(tmp_path / "shards", 600)
    with random_access.server(tmp_path / "shards", 1) as url:
        for urls in ([f"{url}/mds/index.json"], [f"{url}/tar/train-00000.tar"]):
            loader = random_access.ours(urls, 600, tmp_path / "cache", cached=True)
            assert random_access.read(loader, 600, set(range(600))) > 0
            loader.close()


def test_wrong_content_is_found() -> None:
    """A sample with other bytes, and one that comes twice."""
    sums = torch.tensor([zlib.crc32(random_access.payload(number)) for number in range(3)])
    with pytest.raises(AssertionError, match="sample 1 has other bytes"):
        random_access.read([(torch.arange(3), sums + torch.tensor([0, 1, 0]))], 3, {0, 1, 2})
    with pytest.raises(AssertionError):
        random_access.read([(torch.tensor([0, 0, 1]), sums[[0, 0, 1]])], 3, {0, 1, 2})
