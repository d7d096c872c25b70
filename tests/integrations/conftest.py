"""The frameworks run offline and without telemetry."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Read when the frameworks are imported, the first of them while tests are collected: too early for a fixture.
os.environ |= {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    """Accelerate keeps its state in the process, and the HF Trainer configures it; a test leaves none."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
