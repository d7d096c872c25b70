"""Pickles the workers' common set-up once for all workers, and prepares the start of worker processes.

Data path: pool start-up -> [setup_payload] -> process. Spawn and forkserver only; a forked worker inherits the objects.

`multiprocessing` would pickle the dataset for each process. Here it is pickled once, into an anonymous segment that
every worker maps. It is pickled as if for a child process, so that objects that may only be shared by inheritance
(locks, queues, connections, tensors in shared memory) are shared as torch's loader shares them: their descriptors are
collected beside the bytes, and every worker gets duplicates of its own.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import multiprocessing
import multiprocessing.context as context  # noqa: PLR0402 - pyright knows it by this name only
import os
import pickle
import threading
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from multiprocessing import reduction
from typing import Any, NamedTuple

from asyncloader.workers.fetch.error_notes import add_note
from asyncloader.workers.fetch.setup import EpochStart, WorkerSetup
from asyncloader.workers.ipc import segment
from asyncloader.workers.notebook_pickling import FORK, SessionPickler, found_in_main, in_session

_receiving = threading.local()


class InheritedFd:
    """A file descriptor that can be pickled as an argument of a `Process`; the child gets a duplicate."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _inherited, (reduction.DupFd(self.fd),)


def _inherited(duplicate: Any) -> InheritedFd:
    return InheritedFd(duplicate.detach())


class _CollectedFd:
    """Stands in the payload for a descriptor: its index among the collected ones."""

    def __init__(self, index: int) -> None:
        self.index = index

    def detach(self) -> int:
        # A duplicate, because `load` closes the received descriptors when all is unpickled.
        return os.dup(_receiving.fds[self.index])


class _Collector:
    """Collects descriptors while pickling; `multiprocessing.reduction` takes it for the process being started."""

    # `multiprocessing.reduction.DupFd` uses this name, and `duplicate_for_child`, of the process that is being started.
    DupFd = _CollectedFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.fds.append(fd)
        return len(self.fds) - 1


def _set_spawning(collector: _Collector | None) -> None:
    """Set, for this thread, the object that reductions take for the process being started."""
    context.set_spawning_popen(collector)  # type: ignore[arg-type]


class Beginning(NamedTuple):
    """The parts of a set-up in which a replacement differs from the workers that it joins."""

    starts: Sequence[EpochStart]
    attachment: int
    rng_state: bytes


class Payload:
    """A pickled `WorkerSetup` in shared memory. Pickles as an argument of a `Process`; `load` in the child.

    Keep it until every worker has started: it owns the segment's descriptor, and keeps the owners of the collected ones
    alive: the set-up, and objects that reductions created, such as the tensor of a `torch.Generator`'s state.

    Args:
        fd: the segment's descriptor.
        nbytes: bytes of the pickled set-up.
        fds: the collected descriptors.
        owners: kept alive until `close`.
        session: see the attribute.
        beginning: replaces these parts of the pickled set-up.
        environ: the environment to be set before the user's objects are unpickled; None: it stays as it is.
    """

    def __init__(
        self,
        fd: int,
        nbytes: int,
        fds: list[int],
        owners: object = None,
        session: bool = False,
        beginning: Beginning | None = None,
        environ: dict[str, str] | None = None,
    ) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.fds = fds
        self._owners = owners
        self.session = session
        """Whether the workers get the objects of `__main__` by value: see `notebook_pickling.py`."""
        self._beginning = beginning
        self._environ = environ

    def beginning(self, setup: WorkerSetup, environ: dict[str, str] | None) -> Payload:
        """Return the payload of processes that begin as `setup` says, and are otherwise as the processes before them.
        It is valid until the original payload is closed.
        """
        beginning = Beginning(setup.starts, setup.attachment, setup.rng_state)
        return Payload(self.fd, self.nbytes, self.fds, None, self.session, beginning, environ)

    @classmethod
    def dump(cls, setup: WorkerSetup) -> Payload:
        """Pickle the set-up.

        Raises:
            Exception: whatever pickling raises; `explain_unpicklable` finds the part.
        """
        collector = _Collector()
        _set_spawning(collector)
        try:
            buffer = io.BytesIO()
            pickler = _pickler(buffer)
            pickler.dump(tuple(setup))  # its memo keeps all pickled objects alive
        finally:
            _set_spawning(None)
        # A view of the pickle, which may have the size of the dataset, and no copy.
        data = buffer.getbuffer()
        nbytes = len(data)
        fd = segment.create(nbytes)
        try:
            # Before the copy: a shortage of memory is an error here, and would be a SIGBUS there.
            segment.reserve(fd, 0, nbytes)
            segment.map_segment(fd, nbytes)[:] = data
        except BaseException:
            os.close(fd)
            raise
        # Only where descriptors were collected: the collector of garbage does not look into a pickler's memo, so that a
        # dataset that refers to its loader would not be freed with it.
        owners = pickler if collector.fds else None
        return cls(fd, nbytes, collector.fds, owners, isinstance(pickler, SessionPickler))

    def __reduce__(self) -> Any:
        fds = [InheritedFd(fd) for fd in self.fds]
        return _received_payload, (InheritedFd(self.fd), self.nbytes, fds, self._beginning, self._environ)

    def load(self) -> WorkerSetup:
        """Unpickle in the child; closes the descriptors."""
        if self._environ is not None:
            # First: unpickling imports the user's modules, which may read the environment.
            _set_environ(self._environ)
        # The pickle is read from the mapping, so that no worker has a copy of it.
        memory = mmap.mmap(self.fd, self.nbytes, prot=mmap.PROT_READ)
        # For `_CollectedFd.detach`, which reductions call without an argument.
        _receiving.fds = self.fds
        try:
            with found_in_main():
                setup = WorkerSetup(*pickle.loads(memory))
            return setup if self._beginning is None else setup._replace(**self._beginning._asdict())
        finally:
            del _receiving.fds
            self.close()
            for fd in self.fds:
                os.close(fd)

    def close(self) -> None:
        """Close the segment's descriptor, and release the owners of the collected ones."""
        self._owners = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pickler(buffer: io.BytesIO) -> reduction.ForkingPickler | SessionPickler:
    plain = reduction.ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL)
    # With the reductions that multiprocessing and torch have registered.
    return SessionPickler(buffer, plain.dispatch_table) if in_session() else plain


def _received_payload(
    fd: InheritedFd, nbytes: int, fds: list[InheritedFd], beginning: Beginning | None, environ: dict[str, str] | None
) -> Payload:
    return Payload(fd.fd, nbytes, [f.fd for f in fds], beginning=beginning, environ=environ)


def _set_environ(environ: dict[str, str]) -> None:
    # Name by name, not by a new mapping: each assignment also sets the environment of C libraries.
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)


def explain_unpicklable(setup: WorkerSetup) -> str | None:
    """Describe the part of the set-up that cannot be pickled, down to an attribute; None if all of it can."""
    policy = setup.policy
    parts = {
        "dataset": setup.dataset,
        "collate_fn": setup.collate_fn,
        "worker_init_fn": setup.worker_init_fn,
        "decode": setup.decode,
        "on_error": None if policy is None else policy.on_error,
    }
    for name, part in parts.items():
        path, value = find_unpicklable(name, part, depth=4)
        if path is not None:
            return (
                f"{path} = {_short(value)} cannot be pickled, as all that goes to workers must be unless they are "
                "forked. Define functions and classes at the top of a module, open files and connections at the first "
                f"sample, or use {FORK}"
            )
    return None


def find_unpicklable(path: str, value: Any, depth: int) -> tuple[str | None, Any]:
    """Return the innermost part of a value that cannot be pickled, with its path; None if all of it can.

    Args:
        path: the value's.
        value: the value.
        depth: the levels of attributes and containers that are looked at.
    """
    if _pickles(value):
        return None, None
    for name, part in _parts(value) if depth else ():
        found, culprit = find_unpicklable(f"{path}{name}", part, depth - 1)
        if found is not None:
            return found, culprit
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(own := getattr(value, "__dict__", None), dict):
        yield from ((f".{name}", each) for name, each in own.items())
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", each) for number, each in enumerate(value))


def _pickles(value: Any) -> bool:
    # Outside of the start of a process, objects that may only be inherited refuse to be pickled.
    _set_spawning(_Collector())
    try:
        _pickler(io.BytesIO()).dump(value)
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
    """Pickle the set-up, with torch's warning if that fails.

    Raises:
        Exception: whatever pickling raises, with a note that names the part that cannot be pickled.
    """
    try:
        return Payload.dump(setup)
    except ImportError as error:  # of a session's pickler, which says what to do
        with contextlib.suppress(AttributeError):
            del error.__notes__  # pickle's, from Python 3.14 on: they would be the last lines
        raise
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        warnings.warn(_PICKLE_WARNING, stacklevel=2)
        what = explain_unpicklable(setup)
        if what is not None:
            add_note(error, what)
        raise


def import_worker_code() -> None:
    """Import the worker's code before a fork, once for all workers. A replacement that is forked later then runs the
    same code, even if the files have changed.
    """
    import_module("asyncloader.workers.worker")


def preload_in_fork_server(context: Any) -> None:
    """Have a fork server that is not running yet import torch, so that its children start faster."""
    from multiprocessing import forkserver

    server = forkserver._forkserver
    # There is no public API for this; without these attributes, children just start more slowly.
    # Only before the server runs, which reads the list once, and only if the program has not set a list of its own.
    if getattr(server, "_forkserver_pid", 0) is None and getattr(server, "_preload_modules", None) == ["__main__"]:
        context = context if hasattr(context, "set_forkserver_preload") else multiprocessing
        context.set_forkserver_preload(["__main__", "torch", "asyncloader.workers.worker"])
