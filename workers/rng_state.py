"""Saves and restores the states of the process-global random generators.

Data path: worker -> pool -> the replacement's set-up, where a worker leaves. In torch mode only: in seeded mode random
numbers belong to samples. A worker that is killed saves nothing.
"""

from __future__ import annotations

import pickle
import random
from typing import Any, TypeAlias

import numpy as np
import torch

RngState: TypeAlias = tuple[Any, Any, bytes]
"""The states of `random`, numpy and torch."""


def rng_state() -> RngState:
    """Return the states of the process-global generators of `random`, numpy and torch."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()


def set_rng_state(state: RngState) -> None:
    """Set the process-global generators to states that `rng_state` returned, perhaps in another process."""
    ours, numpys, torchs = state
    random.setstate(ours)
    np.random.set_state(numpys)
    # A bytearray: torch warns about memory that cannot be written, as that of bytes.
    torch.set_rng_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))


def save_rng_state() -> bytes:
    """Return what `rng_state` returns, pickled."""
    return pickle.dumps(rng_state(), 5)


def restore_rng_state(saved: bytes) -> None:
    """Set the process-global generators to states that `save_rng_state` returned in another worker."""
    set_rng_state(pickle.loads(saved))
