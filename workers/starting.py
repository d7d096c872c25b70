"""Starts a process of ours as its start method demands.

Data path: pool start-up -> [starting] -> worker process.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from asyncloader.errors import WorkerDied
from asyncloader.socket_folder import shorten_multiprocessing
from asyncloader.workers.bootstrap import gc_paused
from asyncloader.workers.default_signals import signals_blocked
from asyncloader.workers.main_guard import about_main, leave_if_importing_main
from asyncloader.workers.notebook_pickling import file_of_main_hidden
from asyncloader.workers.setup_payload import preload_in_fork_server


def start(process: Any, context: Any, worker_id: int) -> None:
    """Start a process that was made by this multiprocessing context.

    Raises:
        WorkerDied: the fork server has ended.
        SystemExit: this process still imports its main module; see `leave_if_importing_main`.
        OSError: the process could not be started.
        FileNotFoundError: this process's working directory, in which it would begin, was removed.
    """
    method = context.get_start_method()
    leave_if_importing_main(method)
    if method == "fork":
        # Signals are blocked for a fork alone: the child unblocks them. A fork server would keep them blocked for ever,
        # and get no SIGCHLD for its children; a spawned process would not be ended by SIGTERM.
        with gc_paused(), signals_blocked():
            process.start()
        return
    try:
        Path.cwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"the working directory of this process was removed, and a worker by {method!r} begins there: call "
            "os.chdir() with a folder that exists, before the loader starts its workers"
        ) from None
    if method == "forkserver":
        preload_in_fork_server(context)
        shorten_multiprocessing()
    try:
        with file_of_main_hidden():
            try:
                process.start()
            # multiprocessing waits for the server as for a child of its own, and in a forked child it is none.
            except ChildProcessError:
                if method != "forkserver":
                    raise
                _forget_fork_server()
                process.start()
    except (ConnectionError, EOFError):
        if method != "forkserver":
            raise
        # From Python 3.14 on the server itself imports the main module, and ends if that starts workers or raises.
        raise WorkerDied(worker_id, 0, None, "The fork server has ended.", about_main()) from None


def _forget_fork_server() -> None:
    """Make the next start begin a fork server. For a forked child: the fork server that it knows is its parent's."""
    server: Any = forkserver._forkserver
    alive, server._forkserver_alive_fd = server._forkserver_alive_fd, None
    server._forkserver_address = server._forkserver_pid = None
    # The server ends with the last copy of this descriptor: with this copy it would outlive the parent.
    if alive is not None:
        os.close(alive)
