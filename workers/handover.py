"""What a worker that leaves hands to the one that takes its place: where its random numbers stood.

Data path: beside the worker's start and end. Of use in torch mode alone, where random numbers are the worker's; in
seeded mode they are the samples'. A worker that is killed hands over nothing.
"""

from __future__ import annotations

import pickle
import random

import numpy as np
import torch

__all__ = ["restore_generators", "save_generators"]


def save_generators() -> bytes:
    """The states of `random`'s, numpy's and torch's process-global generators, pickled."""
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()), 5)


def restore_generators(saved: bytes) -> None:
    """Set the process-global generators to states that `save_generators` gave in another worker of ours."""
    ours, numpys, torchs = pickle.loads(saved)
    random.setstate(ours)
    np.random.set_state(numpys)
    torch.set_rng_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))
