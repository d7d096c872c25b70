"""Whether a fork would leave a child that cannot read object stores. Off the data path: asked around a fork.

obstore runs its requests in threads of its own, started by the process's first request. A fork copies the
memory and not the threads, so whatever a child asks then waits for threads that exist only in its parent, for
ever. It helps no child to make a new client: the threads belong to the process. Importing obstore and making
clients is harmless; so is a child of "spawn" or "forkserver", which begins with nothing inherited.

This module only remembers. It imports nothing, so a loader can ask it before every fork at no cost:

    if start_method == "fork" and used_before_fork():
        ...  # refuse, or start by "forkserver"
"""

from __future__ import annotations

import os

from asyncloader.transports.errors import TransportError

__all__ = ["note_use", "used_before_fork"]

_NEVER = 0
_BY_ANCESTOR = -1

# The process that used obstore: its pid, or one of the two above.
_user = _NEVER


def used_before_fork() -> bool:
    """Whether a child forked from this process now could not read object stores.

    True from this process's first request on, and in every process that descends by forks from one that had
    made a request. Requests that a program makes by obstore itself, past `ObjectStoreTransport`, are not seen.
    """
    return _user != _NEVER


def note_use() -> None:
    """Note that this process is about to make a request; to be called before each.

    Raises:
        TransportError: an ancestor made one before it forked this process, so this one would never end.
    """
    global _user  # noqa: PLW0603 - one fact about one process
    pid = os.getpid()
    if _user == pid:
        return
    if _user == _NEVER:
        _user = pid
        _watch_forks()
        return
    # The pid tells it too, where a fork went past Python's hooks.
    raise TransportError(
        "this process was forked from one that had already read an object store (s3://, gs://, az://), and "
        "obstore's threads exist only there: a request made here would hang for ever. Start the workers with "
        'multiprocessing_context="forkserver" or "spawn", or read nothing from object stores before the fork'
    )


def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    # A child in a pid namespace of its own can have its parent's pid, so the pid alone is not enough.
    global _user  # noqa: PLW0603 - as above
    _user = _BY_ANCESTOR
