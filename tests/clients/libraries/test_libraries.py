"""Libraries from their own wheels, unchanged, inside `install()`: every batch is that of torch's loader.

Each runs in a process of its own, which imports it (`run.py`), and has a file whose docstring names the loaders used.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CLIENTS = {
    "with_monai": "monai",
    "with_opacus": "opacus",
    "with_recbole": "recbole",
    "with_skorch": "skorch",
    "with_speechbrain": "speechbrain",
    "with_timm": "timm",
    "with_torch_geometric": "torch_geometric",
}

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-clients")


def _python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stderr


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("client", CLIENTS)
def test_client_gets_torchs_batches_from_us(client: str, when: str, method: str) -> None:
    """With and without workers, whether `install` is entered before the library is imported or after."""
    _need(CLIENTS[client])
    _python("-m", "tests.clients.libraries.run", client, when, method)


def test_install_names_what_it_cannot_take_over() -> None:
    """LitData makes torch's iterators itself: a warning names it."""
    _need("litdata")
    assert "does not reach litdata" in _python("-m", "tests.clients.libraries.with_litdata")
