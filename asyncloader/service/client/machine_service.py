"""`workers="shared"`: one node for all processes of a `torchrun` on this machine. The first process starts it.

The node listens at an abstract Unix socket, whose name contains a hash of the run, the user and the definition. Each
process that has had a loader stays connected until it ends, so that the node's processes keep running for its next
loader. When the last process has ended, in whatever way, the node ends, and the name is free again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from asyncloader.process_hooks import in_forked_child
from asyncloader.service.definition import Defined, Definition
from asyncloader.service.fingerprint import import_name
from asyncloader.service.protocol import frames
from asyncloader.service.protocol.address import Service
from asyncloader.service.protocol.connection import Link
from asyncloader.workers.main_guard import unguarded_main

# The id is "none" unless torchrun was given an --rdzv-id; then the port distinguishes the runs of a machine.
_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_PORT")
_ONE_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ASYNCLOADER_")
_LISTENER = 3  # the descriptor in the node


def shared_service(defined: Defined) -> SharedService:
    """Return the service that this run's processes on this machine share for this definition.

    Raises:
        ValueError: this process was not started by torchrun, or the node could not import the definition.
    """
    run = [os.environ.get(name, "") for name in _RUN]
    if not run[0]:
        raise ValueError(
            "workers='shared' is for processes that torchrun started, and TORCHELASTIC_RUN_ID is not set: start the "
            "program with torchrun, or start `asyncloader serve ... --listen unix:/path` and give workers='unix:/path'"
        )
    if sys.platform != "linux":
        raise ValueError(
            "workers='shared' needs abstract Unix sockets, which only Linux has: start `asyncloader serve ... --listen "
            "unix:/path` and give workers='unix:/path'"
        )
    target = _target(defined.definition)
    # A hash, because the name of an abstract socket has 107 bytes at most.
    name = hashlib.sha256("\0".join((*run, str(os.getuid()), target)).encode()).hexdigest()[:32]
    return SharedService(f"unix:@asyncloader-{name}", wait=60.0, target=target)


def _target(made_by: Definition) -> str:
    module = made_by.function.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        if getattr(main, "__spec__", None) is None and getattr(main, "__file__", None) is None:
            raise ValueError(f"{made_by.name} is defined in a session, where no node finds it: put it into a module")
        advice = unguarded_main()
        if advice:
            raise ValueError(f"workers='shared' imports the module that has {made_by.name}. {advice}")
    return f"{import_name(module)}:{made_by.name}"


@dataclass(frozen=True)
class SharedService(Service):
    """A service whose node is started when it is missing.

    Attributes:
        target: the definition that the node serves, as ``module:name``.
    """

    target: str = ""
    greeting_s: ClassVar[float] = 30.0  # the node may still be starting

    def secret(self) -> None:
        """None: the kernel reports the user at the other end, so no token is needed."""

    def start_if_missing(self) -> None:
        """Start the node, unless it runs or is starting.

        Raises:
            OSError: it cannot be started.
        """
        # Binding the name is the test whether the node exists: of all processes that try at a time, the kernel lets one
        # succeed. That process starts the node, which inherits the listening socket. The others find the name in use,
        # connect, and wait in the socket's queue until the node accepts.
        with _here.lock, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _reap()
            try:
                listener.bind(self.url.removeprefix("unix:").replace("@", "\0", 1))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return
                raise
            listener.listen(1024)
            # This copy of the socket is closed at the end of the block: the name is free once no copy is open, and must
            # be free when the node has ended.
            _spawn(listener.fileno(), self.target)

    @property
    def stays(self) -> bool:
        """Whether this process is connected to the node that runs now."""
        descriptor = _here.staying.get(self.url)
        if descriptor is None:
            return False
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)  # the node sends nothing here, so only the end is readable
        return not poll.poll(0)

    def stay(self, link: Link) -> None:
        """Keep this connection until this process ends."""
        in_forked_child(_forget_all)
        link.send(frames.STAY)
        with _here.lock:  # threads that connect at a time: neither may lose the descriptor of the other
            # To an earlier node, which has ended; or to this node, if several threads have connected at a time.
            before = _here.staying.pop(self.url, None)
            # Detached, so that no collected object closes it. The kernel closes it when the process ends, also if
            # killed.
            _here.staying[self.url] = link.sock.detach()
        if before is not None:
            os.close(before)


class _Here:
    """The nodes of this process."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all, in a new process."""
        self.staying: dict[str, int] = {}
        """Descriptors of connections, by URL. They stay open until the process ends."""
        self.started: list[int] = []
        """Process ids of nodes that were not reaped yet."""
        self.lock = threading.Lock()  # a loader's workers look for a node in several threads


_here = _Here()


def _forget_all() -> None:
    """In a forked child: close its copies of the connections, or the node would stay for it."""
    # Without `_here.lock`, which a thread that does not exist here may hold: `begin` makes a new lock.
    for descriptor in _here.staying.values():
        os.close(descriptor)
    _here.begin()


def _spawn(listener: int, target: str) -> None:
    """Start a node."""
    # Without the variables of a rank: the node belongs to all of them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_ONE_RANKS)}
    environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    # `dup2` of a descriptor to itself may leave its close-on-exec flag, and the node would not inherit it.
    spare = os.dup(listener) if listener == _LISTENER else -1
    # Standard output goes to standard error: a trainer's output may be parsed.
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, 2, 1),
        (os.POSIX_SPAWN_DUP2, spare if spare >= 0 else listener, _LISTENER),
    ]
    command = [sys.executable, "-m", "asyncloader.service.node.machine_node", target, str(_LISTENER)]
    try:
        # In its own session: Ctrl-C in the terminal ends the trainers, and the node ends after the last of them.
        _here.started.append(os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True))
    finally:
        if spare >= 0:
            os.close(spare)


def _reap() -> None:
    """Collect the exit codes of nodes that have ended, which would stay as zombies."""
    # Each by its id: `waitpid(-1)` would also take exit codes that the program itself waits for.
    for pid in list(_here.started):
        with suppress(ChildProcessError):
            if not os.waitpid(pid, os.WNOHANG)[0]:
                continue
        _here.started.remove(pid)
