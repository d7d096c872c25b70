"""Takes from this interpreter what Windows' Python lacks. Called first in a program, before asyncloader is imported.

A simulation: the system, its files, its clocks and its sockets are still Linux's.
"""

from __future__ import annotations

import asyncio
import asyncio.selector_events
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
from typing import Any

import torch

MODULES = set(
    "fcntl resource pwd grp termios tty pty syslog readline uvloop _posixshmem _posixsubprocess".split()  # noqa: SIM905
)
NAMES: dict[Any, str] = {
    os: "fork forkpty memfd_create MFD_CLOEXEC register_at_fork sched_getaffinity sched_setaffinity pidfd_open eventfd "
    "pipe2 set_blocking get_blocking WNOHANG waitid wait3 wait4 setsid getsid killpg getuid geteuid getgid nice "
    "getloadavg posix_fadvise posix_fallocate pread preadv pwrite sendfile sysconf uname statvfs fchmod mkfifo "
    "O_CLOEXEC RTLD_NOLOAD RTLD_GLOBAL RTLD_LOCAL RTLD_NOW RTLD_LAZY",
    signal: "SIGKILL SIGSTOP SIGCONT SIGUSR1 SIGUSR2 SIGHUP SIGCHLD SIGALRM SIGPIPE SIGQUIT SIGBUS SIGTRAP SIGRTMIN "
    "SIGRTMAX pthread_sigmask pthread_kill sigwait sigpending siginterrupt setitimer getitimer alarm pause "
    "pidfd_send_signal SIG_BLOCK SIG_UNBLOCK SIG_SETMASK",
    socket: "AF_UNIX send_fds recv_fds SCM_RIGHTS CMSG_SPACE CMSG_LEN MSG_DONTWAIT MSG_CMSG_CLOEXEC SO_PEERCRED",
    select: "poll epoll kqueue POLLIN POLLOUT",
    mmap: "MAP_PRIVATE MAP_ANONYMOUS MAP_ANON MAP_SHARED MAP_NORESERVE MAP_POPULATE PROT_READ PROT_WRITE "
    "MADV_HUGEPAGE MADV_DONTNEED",
}


class _Refuse:
    """Finds none of the modules."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def become_windows() -> None:
    """Remove it all."""
    assert torch.__version__  # it and Python's own modules look for these as they are imported
    _replace_sockets()
    for module, names in NAMES.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Refuse())
    # The default loop of Windows watches no descriptors.
    for name in ("add_reader", "remove_reader", "add_writer", "remove_writer"):
        setattr(asyncio.selector_events.BaseSelectorEventLoop, name, _not_implemented)
    setattr(asyncio.SelectorEventLoop, "add_signal_handler", _not_implemented)  # noqa: B010
    load: Any = ctypes.CDLL.__init__

    def load_by_name(self: Any, name: Any, *args: Any, **options: Any) -> None:
        if name is None:
            raise TypeError("bad argument type for built-in operation")
        load(self, name, *args, **options)

    ctypes.CDLL.__init__ = load_by_name  # type: ignore[method-assign]
    sys.addaudithook(_no_proc)
    sys.platform = "win32"


def _replace_sockets() -> None:
    """Python's own socketpair for Windows has other sockets; the event loops need a pair."""
    pair, unix = socket.socketpair, socket.AF_UNIX
    replaced: Any = socket
    replaced.socketpair = lambda: pair(unix, socket.SOCK_STREAM)


def _not_implemented(*_: Any) -> Any:
    raise NotImplementedError


def _no_proc(event: str, args: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(("/proc", "/sys", "/dev")):
        raise FileNotFoundError(2, "No such file or directory", args[0])
