"""A thread of the loader's computes on one core.

Data path: none; the first thing that a stage's thread does.

torch splits what it computes, copies included, among all cores: in a thread beside the training loop they are taken
from that loop and from the workers. `torch.set_num_threads` would be the wrong call: it also sets what threads begin
with that have not computed yet, the caller's own among them.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path

import torch

__all__ = ["use_one_core"]


def use_one_core() -> None:
    """From now on torch computes in this thread alone what it is asked for in this thread. Where torch has another
    thread pool than OpenMP's, nothing happens.
    """
    torch.get_num_threads()  # a thread gets its number when it first computes: now, and not over ours
    name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
    with suppress(OSError, AttributeError):
        # It is loaded already, and finds the OpenMP that torch itself uses, if there are several.
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)).omp_set_num_threads(ctypes.c_int(1))
