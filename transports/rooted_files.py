"""Opens files below a directory, and translates the system's errors.

Data path: local -> [rooted_files] -> file system.

No path leads out of the root. Names are checked before the open, symbolic links after it: the kernel returns the path
of the file that was opened, so a link that is replaced between a check and an open achieves nothing.
"""

# Names are plain strings: creating a Path per read would cost more than opening the file.
# ruff: noqa: PTH112, PTH115, PTH116, PTH118

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress

from asyncloader.transports.checks import check_path
from asyncloader.transports.errors import AccessDenied, InvalidPath, ObjectNotFound, ReadFailed, TransportError

# Opening a FIFO must not wait for a writer, and a terminal must not become our controlling terminal.
_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


class RootedFiles:
    """The files below one directory. Holds no descriptor, only names.

    Args:
        directory: absolute path. It may be, or become, a link, which is followed wherever it leads.
        descriptors: directory in which the system shows the open files of a process. If it is not available, names are
            resolved a second time and compared with the open file.
    """

    def __init__(self, directory: str, descriptors: str = "/proc/self/fd") -> None:
        self.directory = directory
        self._descriptors = descriptors
        self._real: str | None = None

    def open(self, path: str) -> tuple[int, int]:
        """Open a regular file, `path` below the root, for reading.

        Returns:
            Its descriptor, which the caller closes, and its size in bytes.

        Raises:
            InvalidPath: the path is not canonical, or a link in it leads out of the root.
            ObjectNotFound: no file has this name, or it is not a regular file.
            AccessDenied, ReadFailed: the system refuses or fails.
        """
        check_path(path)
        with os_errors(path, self.directory):
            descriptor = os.open(os.path.join(self.directory, path), _FLAGS)
            try:
                status = os.fstat(descriptor)
                # After the open, by the descriptor: a check of the path would be of another file if a link in it is
                # replaced in between.
                self._refuse_outside(descriptor, path)
                if not stat.S_ISREG(status.st_mode):
                    raise ObjectNotFound(f"{os.path.join(self.directory, path)!r} is not a regular file", path=path)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor, status.st_size

    def paths(self, prefix: str) -> list[str]:
        """Return the paths of the regular files that begin with `prefix`, ascending, including links to such.

        A directory that contains itself by a link is read once, and one that was deleted gives nothing.

        Raises:
            InvalidPath: a directory, or a link in it, leads out of the root.
            ObjectNotFound: the root itself is missing.
            AccessDenied, ReadFailed: the system refuses or fails.
        """
        parent = prefix.rpartition("/")[0]
        found: list[str] = []
        # With the directories above `parent`, a link in it that leads to one of them is skipped, too.
        pending = [(parent, self._above(parent))]
        while pending:
            directory, above = pending.pop()
            with os_errors(directory, self.directory):
                inside, folders, identity = self._scan(directory, above)
            found += [path for path in inside if path.startswith(prefix)]
            pending += [(path, above | {identity}) for path in folders if path.startswith(prefix)]
        return sorted(found)

    def _above(self, directory: str) -> frozenset[tuple[int, int]]:
        """Return the identities of the directories that contain `directory`."""
        found: set[tuple[int, int]] = set()
        while directory:
            directory = directory.rpartition("/")[0]
            with suppress(OSError):  # `_scan` finds the reason
                found.add(_identity(os.stat(os.path.join(self.directory, directory))))
        return frozenset(found)

    def _scan(self, directory: str, above: frozenset[tuple[int, int]]) -> tuple[list[str], list[str], tuple[int, int]]:
        """Return the files and the directories in a directory, and its identity."""
        files: list[str] = []
        folders: list[str] = []
        try:
            descriptor = os.open(os.path.join(self.directory, directory), _FLAGS | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            if os.path.isdir(self.directory):
                return [], [], (0, 0)
            raise
        try:
            self._refuse_outside(descriptor, directory)
            identity = _identity(os.fstat(descriptor))
            if identity in above:
                return [], [], identity
            with os.scandir(descriptor) as names:
                for name in names:
                    path = f"{directory}/{name.name}" if directory else name.name
                    try:
                        is_directory = name.is_dir()
                        if not is_directory and not name.is_file():
                            continue  # a FIFO, a socket, a device, or a link that leads nowhere
                    except OSError as error:
                        if error.errno != errno.ELOOP:
                            raise
                        continue  # a link to itself, which leads nowhere, too
                    if name.is_symlink() and not is_directory:  # directories are checked when they are opened
                        self._refuse_true_path(os.path.realpath(os.path.join(self.directory, path)), path)
                    (folders if is_directory else files).append(path)
        finally:
            os.close(descriptor)
        return files, folders, identity

    def refuse_outside(self, folder: str, path: str) -> None:
        """Refuse a directory that links lead out of the root. Raises InvalidPath about `path`."""
        self._refuse_true_path(os.path.realpath(folder), path)

    def _refuse_outside(self, descriptor: int, path: str) -> None:
        self._refuse_true_path(self._true_path(descriptor, path), path)

    def _true_path(self, descriptor: int, path: str) -> str:
        """Return the path of the open file, with all links resolved."""
        try:
            return os.readlink(f"{self._descriptors}/{descriptor}")
        except OSError:
            true = os.path.realpath(os.path.join(self.directory, path))
            if not os.path.samestat(os.stat(true), os.fstat(descriptor)):
                raise ReadFailed(f"{path!r} was replaced while it was opened; read it again", path=path) from None
            return true

    def _refuse_true_path(self, true: str, path: str) -> None:
        if self._real is not None and _below(true, self._real):
            return
        self._real = os.path.realpath(self.directory)  # the root may be a link, which may have changed
        if not _below(true, self._real):
            raise InvalidPath(
                f"{path!r} leads out of the root {self.directory!r} by a link, which is refused; "
                "open a transport at a directory that holds both the link and what it points to",
                path=path,
            )


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _below(true: str, root: str) -> bool:
    return true == root or true.startswith(root.rstrip("/") + "/")


@contextmanager
def os_errors(path: str, root: str) -> Generator[None, None, None]:
    """Translate the system's errors about `path` below `root` into `TransportError`s."""
    where = repr(os.path.join(root, path))
    try:
        yield
    except TransportError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        there = os.path.isdir(root)
        missing = ObjectNotFound(
            f"{where} does not exist" if there else f"the root {root!r} is not a directory", path=path
        )
        # A missing root, such as a disk that is not mounted at the moment, proves nothing about a file.
        missing.about_sample = there
        raise missing from error
    except PermissionError as error:
        raise AccessDenied(f"no permission to read {where}", path=path) from error
    except OSError as error:
        if error.errno in {errno.ENAMETOOLONG, errno.ELOOP}:
            raise InvalidPath(f"{where}: {error.strerror}", path=path) from error
        if error.errno == errno.ENXIO:
            raise ObjectNotFound(f"{where} is not a regular file", path=path) from error
        failed = ReadFailed(f"reading {where} failed: {error.strerror}", path=path)
        failed.errno = error.errno
        raise failed from error
