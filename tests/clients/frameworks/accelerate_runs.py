"""Loaders prepared by Accelerate, with the integration and without, and the batches and draws of their epochs."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator

import asyncloader
from asyncloader import Tuning
from asyncloader.integrations.accelerate import prepare
from tests.clients.frameworks.helping import draws, seed_all

STOCK: Any = torch.utils.data.DataLoader
OURS: Any = asyncloader.DataLoader
OWN: dict[str, Any] = {"tuning": Tuning(ring_bytes=1 << 20), "snapshot_every_n_steps": 3}


def accelerator(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, **options)


def prepared(loader: Any, **options: Any) -> Any:
    """Prepare a loader by Accelerate alone, or with our integration if the loader is ours."""
    if isinstance(loader, OURS):
        return prepare(accelerator(**options), loader)
    return accelerator(**options).prepare(loader)


def both(dataset: Any, *, own: dict[str, Any] = OWN, config: Any = None, **arguments: Any) -> list[Any]:
    """Prepare the same loader twice: torch's by Accelerate, ours with the integration."""
    options = {} if config is None else {"dataloader_config": config}
    return [
        prepared(STOCK(dataset, **arguments), **options),
        prepared(OURS(dataset, **arguments, **own), **options),
    ]


def epochs(loader: Any, number: int = 2) -> tuple[list[list[Any]], Any]:
    """Read whole epochs from given seeds. Returns them, and draws of the generators afterwards."""
    seed_all()
    return [list(loader) for _ in range(number)], draws()
