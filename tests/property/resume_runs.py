"""Runs one loader at a time, step by step, for the property about resuming, and transports states between runs."""

from __future__ import annotations

import asyncio
import io
import json
import random
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from asyncloader import AsyncDataLoader, DataLoader
from tests.property.resume_cases import Case, Part


class Run:
    """A loader that is iterated step by step, of either kind."""

    def __init__(self, case: Case, part: Part, rank: int, generator_seed: int) -> None:
        self._exits = ExitStack()
        make: Any = DataLoader if part.loop == "sync" else AsyncDataLoader
        self.loader: Any = make(**case.arguments(part, rank, generator_seed))
        self._runner = None if part.loop == "sync" else self._exits.enter_context(asyncio.Runner())
        self._batches: Any = None

    def begin(self) -> None:
        self._batches = iter(self.loader) if self._runner is None else aiter(self.loader)

    def step(self) -> torch.Tensor | None:
        """Return the next batch; None at the end."""
        if self._runner is None:
            batch = next(self._batches, None)
        else:
            try:
                batch = self._runner.run(_next(self._batches))
            except StopAsyncIteration:
                return None
        return None if batch is None else batch.clone()

    def rest(self) -> list[torch.Tensor]:
        batches: list[torch.Tensor] = []
        while (batch := self.step()) is not None:
            batches.append(batch)
        return batches

    def close(self) -> None:
        self._batches = None
        if self._runner is None:
            self.loader.close()
        else:
            self._runner.run(self.loader.aclose())
        self._exits.close()


async def _next(batches: Any) -> Any:
    return await anext(batches)


def passed(state: dict[str, Any], passage: str) -> dict[str, Any]:
    """Return the state as another process receives it."""
    if passage == "json":
        state = json.loads(json.dumps(state))
    if passage == "torch":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    return state


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
