"""What is needed before a worker process can be started: its set-up as bytes, a fork server that knows torch.

Data path: pool start-up -> [starting] -> process.
"""

from __future__ import annotations

import multiprocessing
import pickle
import warnings
from importlib import import_module
from typing import Any

from asyncloader.workers.info import WorkerSetup
from asyncloader.workers.payload import Payload, explain_unpicklable

__all__ = ["dump", "import_worker_code", "preload_in_fork_server"]

_PICKLE_WARNING = (
    "Got pickle error when attempting to start a worker Process. "
    "This might be because the worker Process arguments are not picklable. "
    "Python 3.14+ changed the multiprocessing start method in non-Mac POSIX platforms "
    "to 'forkserver', which requires the worker Process arguments to be picklable. "
    "You can also try multiprocessing.set_start_method('fork')."
)


def dump(setup: WorkerSetup) -> Payload:
    """Pickle the set-up, with torch's warning if it cannot be.

    Raises:
        Exception: whatever pickling raises, as it is, so that a traceback ends as torch's does. What it was that cannot
            be pickled says its cause, which stands before it.
    """
    try:
        return Payload.dump(setup)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        warnings.warn(_PICKLE_WARNING, stacklevel=2)
        what = explain_unpicklable(setup)
        if what is None:
            raise
        raise error from TypeError(what)


def import_worker_code() -> None:
    """Before a fork: what a worker runs is imported here, once for all that are ever forked. A replacement then runs
    this process's code, whatever has become of the files.
    """
    import_module("asyncloader.workers.worker")


def preload_in_fork_server(context: Any) -> None:
    """Let a fork server that is not running yet import torch, so that its children have it from the start."""
    from multiprocessing import forkserver

    server = forkserver._forkserver
    # There is no public way to ask; where the attributes are missing, children just start more slowly.
    if getattr(server, "_forkserver_pid", 0) is None and getattr(server, "_preload_modules", None) == ["__main__"]:
        context = context if hasattr(context, "set_forkserver_preload") else multiprocessing
        context.set_forkserver_preload(["__main__", "torch", "asyncloader.workers.worker"])
