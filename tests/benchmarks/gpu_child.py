"""What runs in the fresh process of one measurement on a card: `python -m tests.benchmarks.gpu_child JOB OUTPUT`.

JOB is the JSON of a `GpuJob`; its `Outcome` goes to the file OUTPUT as JSON.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .gpu_plan import SPDLS, GpuJob, Outcome


def measure(job: GpuJob) -> Outcome:
    """Carry out a job in this process."""
    from . import gpu_end, gpu_slot, gpu_soak, gpu_step

    probes: dict[str, Callable[[GpuJob], Outcome]] = {
        "slot": gpu_slot.slot,
        "lock": gpu_slot.lock,
        "end": gpu_end.end,
        "step": gpu_step.step,
        "soak": gpu_soak.soak,
    }
    return probes[job.probe](job)


def _unlink_shared_memory() -> None:
    """Remove the names of the segments of `multiprocessing` that this process has mapped: gigabytes that would stay."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        found = re.search(r"(/dev/shm/psm_\w+)$", line)
        if found is not None:
            Path(found[1]).unlink(missing_ok=True)


def main() -> None:
    """Run the job named on the command line and write its result."""
    import torch

    # The host's part of the consumer computes in one thread: with more, its pool would fight the workers for the cores.
    torch.set_num_threads(1)
    given: dict[str, Any] = json.loads(sys.argv[1])
    given["workers"] = tuple(given["workers"])
    job = GpuJob(**given)
    result = measure(job)
    Path(sys.argv[2]).write_text(json.dumps(result._asdict()), encoding="utf-8")
    if job.loader in SPDLS:
        _unlink_shared_memory()
        os._exit(0)  # in the middle of an epoch: its threads may wait for its processes


if __name__ == "__main__":
    main()
