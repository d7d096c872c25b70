"""Keeps CPUs busy while the cost of samples is measured: a run keeps them busy, too.

Data path: none.

Two CPUs are often two threads of one core, and share caches and memory: a computation takes up to 1.7 times the CPU
time while the others compute, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack

from asyncloader.plain_context import plain_context

# Of the lowest priority, so that no other work waits for it. It also ends when this process is killed.
_PROGRAM = """
import os, sys
hasattr(os, "nice") and os.nice(19)
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@plain_context
def busy_cpus(number: int) -> Generator[None]:
    """Context in which this number of processes compute. Where none can be started, it does nothing.

    Args:
        number: of CPUs besides the one that this process uses; below 1: none.
    """
    with ExitStack() as stack:
        for _ in range(number if sys.executable else 0):
            try:
                process = subprocess.Popen([sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid())])
            except OSError:  # too many processes: measured without them
                break
            stack.enter_context(process)
            stack.callback(process.kill)
        yield
