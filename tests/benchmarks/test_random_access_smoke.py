"""The benchmarks of random access: they run, and find wrong content. No speed is asserted."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from . import local_access, random_access


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


def test_local_access_is_measured_and_verified(tmp_path: Path) -> None:
    """Of a few formats; and samples in another order, or with other bytes, are found."""
    local_access.write(tmp_path, 12, ("mds", "jsonl"))
    loop = asyncio.new_event_loop()
    seen: list[Any] = []
    for kind in ("mds", "jsonl"):
        epoch = local_access.ours(tmp_path, kind, loop)
        epoch([[3, 11, 0], [5]], lambda samples, _: seen.append(samples))
        epoch([[3, 11, 0], [5]], local_access.check)
        epoch([[3, 11, 0], [5]], local_access.check_ends)
    loop.close()
    for samples in seen[::2]:
        for wrong in ([3, 11, 1], [3, 11]):
            with pytest.raises(AssertionError):
                local_access.check_ends(samples, wrong)
        with pytest.raises(AssertionError, match="sample 4 has another"):
            local_access.check(samples, [3, 4, 0])
