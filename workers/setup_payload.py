"""The workers' common set-up as bytes: pickled once for all workers, with torch's own reductions.

Data path: pool start-up (spawn and forkserver; a forked worker inherits the objects themselves).

`multiprocessing` would pickle the dataset anew for each process. Here it is pickled once, into an anonymous segment
that every worker maps. Pickling happens as if for a child process, so that what may only be shared by inheritance
(locks, queues, connections, tensors in shared memory) is shared as torch's loader shares it: the descriptors are
collected beside the bytes, and every worker gets its own duplicates of them.

What is needed before a worker process can be started: its set-up as bytes, a fork server that knows torch.

Data path: pool start-up -> [starting] -> process.
"""

from __future__ import annotations

import io
import mmap
import multiprocessing
import multiprocessing.context as context  # noqa: PLR0402 - pyright knows it by this name only
import os
import pickle
import threading
import warnings
from importlib import import_module
from multiprocessing import reduction
from typing import Any

from asyncloader.workers.fetch.setup import WorkerSetup
from asyncloader.workers.memory import segment

__all__ = [
    "InheritedFd",
    "Payload",
    "dump",
    "explain_unpicklable",
    "import_worker_code",
    "preload_in_fork_server",
]

_receiving = threading.local()


class InheritedFd:
    """A descriptor that reaches the child when the object is pickled as an argument of its `Process`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _inherited, (reduction.DupFd(self.fd),)


def _inherited(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())


class _CollectedFd:
    """Stands in the payload for a descriptor: its place among those that travel beside it."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        return os.dup(_receiving.fds[self.index])


class _Collector:
    """What `multiprocessing.reduction` asks of the process object that it pickles for."""

    DupFd = _CollectedFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1


def _set_spawning(collector: _Collector | None) -> None:
    """Tell the reductions, in this thread, for which "process" they pickle."""
    context.set_spawning_popen(collector)  # type: ignore[arg-type]


class Payload:
    """A pickled `WorkerSetup` in shared memory. Pickles as an argument of a `Process`; `load` in the child.

    Keep it until every worker has started: it owns a descriptor, and holds what owns those beside it: the set-up, and
    what reductions made while pickling, such as the tensor of a `torch.Generator`'s state.
    """

    def __init__(self, fd: int, nbytes: int, fds: list[int], owners: object = None) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.fds = fds
        self._owners = owners

    @classmethod
    def dump(cls, setup: WorkerSetup) -> Payload:
        """Pickle the set-up.

        Raises:
            Exception: whatever pickling raises; `explain_unpicklable` tells which part it was.
        """
        collector = _Collector()
        _set_spawning(collector)
        try:
            buffer = io.BytesIO()
            pickler = reduction.ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL)
            pickler.dump(tuple(setup))  # its memo refers to all that it has pickled
        finally:
            _set_spawning(None)
        data = buffer.getbuffer()
        nbytes = len(data)
        fd = segment.create(nbytes)
        try:
            segment.reserve(fd, 0, nbytes)
            segment.map_segment(fd, nbytes)[:] = data
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, nbytes, collector.fds, pickler)

    def __reduce__(self) -> Any:
        return _received_payload, (InheritedFd(self.fd), self.nbytes, [InheritedFd(fd) for fd in self.fds])

    def load(self) -> WorkerSetup:
        """Unpickle in the child; takes the descriptors."""
        memory = mmap.mmap(self.fd, self.nbytes, prot=mmap.PROT_READ)
        _receiving.fds = self.fds
        try:
            return WorkerSetup(*pickle.loads(memory))
        finally:
            del _receiving.fds
            self.close()
            for fd in self.fds:
                os.close(fd)

    def close(self) -> None:
        """Close the payload's descriptor, and let go of what owns those beside it."""
        self._owners = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _received_payload(fd: InheritedFd, nbytes: int, fds: list[InheritedFd]) -> Payload:
    return Payload(fd.fd, nbytes, [f.fd for f in fds])


def explain_unpicklable(setup: WorkerSetup) -> str | None:
    """Which part of the set-up cannot be pickled, down to an attribute; None when all of it can."""
    for name in ("dataset", "collate_fn", "worker_init_fn"):
        path, value = _find_unpicklable(name, getattr(setup, name), depth=3)
        if path is not None:
            return f"{path} = {_short(value)} is what cannot be pickled"
    return None


def _find_unpicklable(path: str, value: Any, depth: int) -> tuple[str | None, Any]:
    if _pickles(value):
        return None, None
    inner = getattr(value, "__dict__", None)
    if depth and isinstance(inner, dict):
        for name, attribute in inner.items():
            found, culprit = _find_unpicklable(f"{path}.{name}", attribute, depth - 1)
            if found is not None:
                return found, culprit
    return path, value


def _pickles(value: Any) -> bool:
    _set_spawning(_Collector())
    try:
        reduction.ForkingPickler.dumps(value)
    except Exception:
        return False
    finally:
        _set_spawning(None)
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


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
