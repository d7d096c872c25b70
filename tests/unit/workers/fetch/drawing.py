"""The numbers that the random generators give, for tests that compare them."""

from __future__ import annotations

import random

import numpy as np
import torch

from asyncloader.workers.fetch.seeding import SampleSeeder, sample_rng


def drawn() -> tuple[float, ...]:
    """One number of each generator, global and of the sample."""
    rng = sample_rng()
    own = rng.random.random(), float(rng.numpy.random()), float(torch.rand((), generator=rng.torch))
    return random.random(), float(np.random.random()), float(torch.rand(())), *own


def at_sample(position: int, *words: int) -> tuple[float, ...]:
    """The numbers that are drawn first in the sample at a position."""
    SampleSeeder(1, 0, *words).sample(position)
    return drawn()
