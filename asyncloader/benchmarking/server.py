"""Imports the user's module once, and measures each loader in a fork of this process.

Data path: jobs -> [server: fork -> measuring] -> results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from asyncloader.benchmarking.measuring import look, measure
from asyncloader.verification.server import serve
from asyncloader.verification.user_code import UserFailure


def main(fd: int, target: str) -> None:
    """Serve jobs over a connection until it is closed."""
    # A fork cannot use the threads that torch has started for computations, and would wait for them forever. So torch
    # computes in a single thread while the module is imported, and each fork restores the number of threads.
    of_torch: Any = torch
    set_threads, wanted = torch.set_num_threads, [torch.get_num_threads()]
    set_threads(1)
    of_torch.set_num_threads = wanted.append

    def carry_out(
        job: dict[str, Any], make: Callable[[], Any], note: Callable[[str], None]
    ) -> dict[str, Any] | UserFailure:
        of_torch.set_num_threads = set_threads
        set_threads(wanted[-1])
        return look(make) if job["do"] == "look" else measure(make, job, note)

    serve(fd, target, carry_out)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
