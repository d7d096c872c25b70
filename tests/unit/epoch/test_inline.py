"""The work that an epoch without workers does for a batch besides fetching it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.running import collect


def within_itself(samples: list[torch.Tensor]) -> list[Any]:
    """Collates to a batch that refers to itself."""
    batch: list[Any] = [torch.stack(samples)]
    batch.append(batch)
    return batch


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
def test_a_batch_within_itself_is_delivered(kind: str) -> None:
    """A batch that refers to itself is delivered, as by torch's loader."""
    batches = collect(kind, torch.zeros(4, 2), batch_size=2, collate_fn=within_itself)
    assert [(batch[0].shape, batch[1] is batch) for batch in batches] == [((2, 2), True)] * 2
