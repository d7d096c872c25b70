"""Hands the state of the process-global random generators from a worker that leaves to its replacement.

Data path: worker -> pool -> the replacement's set-up. In torch mode only: in seeded mode random numbers belong to
samples. A worker that is killed saves nothing.
"""

from __future__ import annotations

import pickle
import random

import numpy as np
import torch


def save_rng_state() -> bytes:
    """Return the pickled states of the process-global generators of `random`, numpy and torch."""
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()), 5)


def restore_rng_state(saved: bytes) -> None:
    """Set the process-global generators to states that `save_rng_state` returned in another worker."""
    ours, numpys, torchs = pickle.loads(saved)
    random.setstate(ours)
    np.random.set_state(numpys)
    # A bytearray: torch warns about memory that cannot be written, as that of bytes.
    torch.set_rng_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))
