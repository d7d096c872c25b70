"""Marks the loader's work in torch's profiler, and in NVIDIA's.

Data path: beside the consumer.

A range is entered only while torch's profiler runs, or NVIDIA's has started this program: the callers test `recorded`
first.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch
from torch.autograd import profiler

NVTX = any(name in os.environ for name in ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH"))
"""Whether NVIDIA's profiler has started this program: it gives its children one of these variables."""


def recorded() -> bool:
    """Whether ranges are recorded, of this thread or another."""
    # Not `_profiler_enabled`: a call into torch, whose code is not in the caches, takes 13 microseconds.
    return NVTX or profiler._is_profiler_enabled


def in_range(name: str) -> AbstractContextManager[object]:
    """Return a context whose time is a range of this name. Call it while `recorded`."""
    if NVTX and torch.cuda.is_available():
        return torch.cuda.nvtx.range(name)
    return profiler.record_function(name)
