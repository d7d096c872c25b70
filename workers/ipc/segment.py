"""Creates and maps anonymous shared memory segments, which are never closed explicitly.

Data path: worker -> [segment, under the ring] -> consumer.

A segment is a file descriptor without a name (`memfd_create`; where that is missing, POSIX shared memory that is
unlinked at once). Once mapped, the descriptor may be closed: the pages live as long as a mapping in any process, and
are freed with the last mapping, even after SIGKILL.

`reserve` allocates pages before they are touched, so that a shortage is an `OSError` here and not a SIGBUS in the
middle of a `memcpy`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from asyncloader.errors import RING_ADVICE, RingMemoryError

if sys.platform != "win32":
    import resource

_MADV_POPULATE_WRITE = 23  # linux/mman.h; Python has no name for it
_CHECKED_BYTES = 64 << 20
"""From this size on, the free memory is checked before a batch gets a segment of its own; a check takes 50 us."""
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class Mapping(mmap.mmap):
    """A mapped segment.

    Unless it is watched, no Python code runs when it is unmapped.
    """

    # This class has no `__del__`: the last view may die inside torch, in a daemon thread, while the interpreter is
    # shutting down. Python code would release the GIL there; a thread that cannot get it back is ended, and in the
    # middle of C++ code that aborts the process.
    before_unmapping: Callable[[], None] | None = None

    def watch(self, before_unmapping: Callable[[], None]) -> None:
        """Have this called before the memory is unmapped, in the thread that drops the last view."""
        self.before_unmapping = before_unmapping
        self.__class__ = _Watched  # pyright: ignore[reportAttributeAccessIssue] - only `__del__` is added


class _Watched(Mapping):
    # Not a weak reference's callback: it would run only after the pages were unmapped.
    def __del__(self) -> None:
        if self.before_unmapping is not None:
            self.before_unmapping()


def create(nbytes: int) -> int:
    """Create a segment of `nbytes` (not reserved yet) and return its descriptor, which the caller owns.

    Raises:
        RingMemoryError: the system refuses a segment of this size.
    """
    fd = _open_anonymous()
    try:
        os.ftruncate(fd, nbytes)
    except (OSError, OverflowError) as error:
        os.close(fd)
        limit, reason = _process_limit(resource.RLIMIT_FSIZE, "file size limit, ulimit -f")
        raise RingMemoryError(nbytes, limit, f"{reason}; ftruncate of the segment: {error}") from error
    return fd


def _open_anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("asyncloader", os.MFD_CLOEXEC)
    return _open_unlinked()


def _open_unlinked() -> int:
    """Create POSIX shared memory under a random name, and unlink it at once (macOS)."""
    # The module under multiprocessing.shared_memory: private, but the only access to shm_open.
    import _posixshmem  # type: ignore[import-not-found]

    while True:
        name = f"/al{secrets.token_hex(6)}"
        try:
            fd: int = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        except FileExistsError:
            continue
        _posixshmem.shm_unlink(name)
        return fd


def map_segment(fd: int, nbytes: int) -> Mapping:
    """Map the whole segment, readable and writable. The descriptor may be closed afterwards.

    Raises:
        RingMemoryError: no address space for it (``ulimit -v``, or too many mappings).
        OSError: the descriptor is not that of a segment.
    """
    try:
        # No caller closes it: `mmap.close()` succeeds under a live ``torch.frombuffer`` tensor and leaves it dangling.
        # Dropping the last reference unmaps at the right time.
        return Mapping(fd, nbytes)
    except OSError as error:
        if error.errno != errno.ENOMEM:  # a peer may have passed any descriptor
            raise
        limit, reason = _process_limit(resource.RLIMIT_AS, "address space limit, ulimit -v")
        raise RingMemoryError(nbytes, limit, f"{reason}; mmap of the segment: {error}") from error


def _process_limit(which: int, name: str) -> tuple[int | None, str]:
    """Return the process's limit of this kind and its name; if it has none, the available memory."""
    soft = resource.getrlimit(which)[0]
    return memory_limit() if soft == resource.RLIM_INFINITY else (soft, name)


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Allocate the pages of this range now. Idempotent.

    Raises:
        RingMemoryError: the memory does not suffice. Pages that were reserved before stay usable.
    """
    if not hasattr(os, "posix_fallocate"):
        return  # macOS: only `check_room` protects
    while True:
        try:
            os.posix_fallocate(fd, offset, nbytes)
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                limit, reason = memory_limit()
                raise RingMemoryError(nbytes, limit, f"{reason}; fallocate: {error.strerror}") from error
            # These two say that the file system cannot allocate ahead: pages are then allocated when they are first
            # written.
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        return


def written(nbytes: int, write: Callable[[Mapping, int], None]) -> int:
    """Return the descriptor of a new segment for one batch, which `write` wrote at offset 0.

    Raises:
        RingMemoryError: the memory does not suffice.
    """
    if nbytes >= _CHECKED_BYTES:
        check_room(nbytes, "one batch")  # first: the kernel would overcommit, and then kill a process
    fd = create(nbytes)
    try:
        reserve(fd, 0, nbytes)
        write(map_segment(fd, nbytes), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def populate(memory: mmap.mmap, address: int) -> None:
    """Allocate all pages of a mapping now, without the GIL. A no-op before Linux 5.14: pages are allocated on first
    access then.

    Raises:
        RingMemoryError: there is no memory for them.
    """
    nbytes = len(memory)
    check_room(nbytes, "all pages of a ring")
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)  # not `mmap.madvise`, which holds the GIL
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(_MADV_POPULATE_WRITE)) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        limit, reason = memory_limit()
        raise RingMemoryError(nbytes, limit, f"{reason}; madvise of the ring: {os.strerror(code)}")


def check_room(nbytes: int, what: str, advice: str = RING_ADVICE) -> None:
    """Check that `nbytes` can fit at all, before anything is allocated.

    Raises:
        RingMemoryError: `nbytes` exceed the memory of the machine, or of this process's control group.
    """
    limit, reason = memory_limit()
    if limit is not None and nbytes > limit:
        raise RingMemoryError(nbytes, limit, f"{reason}; wanted for {what}", advice)


def memory_limit() -> tuple[int | None, str]:
    """Return the bytes that this process may still allocate, None if unknown, and the source of that bound."""
    bounds: list[tuple[int, str]] = []
    available = _meminfo_available()
    if available is not None:
        bounds.append((available, "memory available on this machine"))
    for group in memory_groups():
        room = _cgroup_room(group)
        if room is not None:
            bounds.append((room, f"memory limit of control group {group}"))
    if not bounds:
        return None, "the system does not tell its memory"
    return min(bounds)


def _meminfo_available() -> int | None:
    available = numbers_in(Path("/proc/meminfo")).get("MemAvailable:")
    return None if available is None else available * 1024


def numbers_in(path: Path) -> dict[str, int]:
    """Return the numbers of a file that has a name and a number in each line; nothing if it cannot be read."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        return {line[0]: int(line[1]) for line in lines if len(line) > 1}
    except (OSError, ValueError):
        return {}


def memory_groups(pid: int | None = None) -> list[Path]:
    """Return the control groups that limit a process's memory: its own and their ancestors. `pid` None: ours."""
    found: list[Path] = []
    try:
        lines = Path(f"/proc/{pid or 'self'}/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # The one group of version 2, which has no list of controllers.
        if controllers == "":
            root = _CGROUP_ROOT
        elif "memory" in controllers.split(","):
            root = _CGROUP_ROOT / "memory"
        else:
            continue
        group = root / path.lstrip("/")
        found += [p for p in (group, *group.parents) if p == root or root in p.parents]
    return found


def _cgroup_room(group: Path) -> int | None:
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            text = (group / limit_name).read_text().strip()
            limit = 1 << 63 if text == "max" else int(text)
            usage = int((group / usage_name).read_text())
        except (OSError, ValueError):
            continue
        if limit >= 1 << 60:  # v1 reports "no limit" as a number near 2**63
            return None
        # File cache of the group is reclaimed under pressure, so it counts as free.
        kinds = numbers_in(group / "memory.stat")
        return max(0, limit - usage + kinds.get("inactive_file", kinds.get("total_inactive_file", 0)))
    return None
