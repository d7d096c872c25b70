"""The frameworks run offline and without telemetry."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

# These are read when the frameworks are imported, partly while tests are collected: too early for a fixture.
os.environ |= {
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@pytest.fixture
def accelerate_state() -> Iterator[None]:
    """Reset Accelerate's state after a test: it lives in the process, and the HF Trainer configures it."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Framework(pytest.Module):
    """A file of tests that import a framework at their top: skipped where that cannot be imported."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        for name in ("accelerate", "lightning"):
            if self.path.name.startswith(f"test_{name}"):
                pytest.importorskip(name)
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    """Make the module for a file of this folder."""
    module: pytest.Module = Framework.from_parent(parent, path=module_path)
    return module
