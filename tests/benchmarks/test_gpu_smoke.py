"""The benchmarks on a card, on the CPU: tables are made, and wrong content is found."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from . import gpu, gpu_child

JOB = {"device": "cpu", "batch": 4, "seconds": 0.01, "dtype": "uint8", "workers": 1}


@pytest.mark.parametrize("loader", gpu_child.LOADERS)
def test_a_rate_is_measured(loader: str) -> None:
    """Of each loader, with the CPU time of a batch."""
    found = gpu_child.rate({**JOB, "loader": loader})
    assert found["rate"] > 0 < found["cpu"]


def test_a_step_is_measured() -> None:
    """Beside the same step on a cached batch."""
    found = gpu_child.step(JOB)
    assert found.keys() == set(gpu_child.LOADERS)
    assert all(fed > 0 < cached for fed, cached in found.values())


def test_wrong_content_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose images are not those of its numbers ends the measurement."""

    def wrong(self: Any, index: int) -> tuple[torch.Tensor, int]:
        return self.pool[(index + (index == 9)) % gpu_child.POOL], index

    monkeypatch.setattr(gpu_child.Images, "__getitem__", wrong)
    with pytest.raises(AssertionError, match="torch: batch 2 has other content"):
        gpu_child.rate({**JOB, "loader": gpu_child.TORCH})


def test_the_section_names_what_is_short() -> None:
    """A rate below torch's, and a step that the loader holds up."""
    options = argparse.Namespace(rounds=1, device="cpu", batch=4, workers=[2])
    figures = gpu.Figures()
    for loader, rate, step in zip(gpu_child.LOADERS, (100.0, 200.0, 90.0), (1.5, 1.0, 1.03), strict=True):
        for dtype in gpu.DTYPES:
            figures.add(f"{dtype}, 2 workers", loader, rate)
            figures.add(f"CPU, {dtype}, 2 workers", loader, 0.001)
        figures.add("step", loader, step)
    text, short = gpu.section(figures, options)
    assert "| uint8, 2 workers | 100 | 200 (2.00 x) | 90 (0.90 x) | 1.00 | 1.00 |" in text
    assert len(short) == 3
    assert short[-1] == "a step fed by AsyncDataLoader: 1.030 of its time"
