"""How a worker process keeps its garbage collector and its allocator from doing the same work over and over.

Data path: worker start-up, before the first task. A worker is ours alone: nobody else's process is touched.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys

__all__ = ["tune"]

_PYTHONS_THRESHOLDS = (700, 2000)
"""New objects after which the youngest are collected where nobody has said otherwise: up to Python 3.12, and since."""

_IN_FLIGHT = 50_000
"""The same where hundreds of samples are in hand. Not more: it bounds what garbage in cycles holds on to."""

# Of <malloc.h>: which setting, and its value.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ((_TRIM_THRESHOLD, 256 << 20), (_TOP_PAD, 16 << 20), (_MMAP_THRESHOLD, 64 << 20))


def tune(*, concurrent: bool) -> None:
    """Set this worker up.

    What was there before the first task (torch's modules, the dataset) is not looked at by the collector again; a
    forked worker's pages stay shared, besides.

    Samples in flight outlive collections of the youngest objects, for nothing: a few hundred are some ten thousand
    objects, so the collector looks when there are several times as many. And the buffers of their bodies come and go by
    the megabyte: glibc would give pages back and fault them in again for each wave. (Together a third of the CPU that a
    remote read costs. A worker's heap stays at its peak; the main process is left alone.) What the user has set stands.

    Args:
        concurrent: hundreds of samples are in hand at a time.
    """
    gc.freeze()
    if not concurrent:
        return
    if gc.get_threshold()[0] in _PYTHONS_THRESHOLDS:
        gc.set_threshold(_IN_FLIGHT, 20, 50)
    if sys.platform.startswith("linux") and not any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another libc has none
        if mallopt is not None:
            for setting, value in _SETTINGS:
                mallopt(setting, value)
