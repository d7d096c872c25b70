"""Whether a file of the local cache survived what happened to the system. Data path: under `cache_store`."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from functools import cache

from asyncloader.transports.cache_layout import BOOT_SIZE, SYNCED, Footer
from asyncloader.transports.cache_usage import OPEN_FLAGS, same_file

__all__ = ["boot", "verify"]

_AT_ONCE = 1 << 20


def verify(descriptor: int, path: str, footer: Footer) -> bool:
    """Whether the bytes are those that were written.

    A file that was written since the system started is what the page cache says. One from before is read once,
    as its last blocks may have reached the disk and others not, and marked with this start.
    """
    now = boot()
    if footer.boot in {SYNCED, now}:
        return True
    crc = position = 0
    while position < footer.size:
        data = os.pread(descriptor, min(_AT_ONCE, footer.size - position), position)
        if not data:
            return False
        crc = zlib.crc32(data, crc)
        position += len(data)
    if crc != footer.crc:
        return False
    with suppress(OSError):  # a directory that cannot be written to: verified at every use
        writable = os.open(path, os.O_WRONLY | OPEN_FLAGS)
        try:
            if same_file(descriptor, path):
                os.pwrite(writable, now, os.fstat(descriptor).st_size - BOOT_SIZE)
        finally:
            os.close(writable)
    return True


@cache
def boot() -> bytes:
    """Give this start of the system, `SYNCED` where the system does not name it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:  # noqa: PTH123
            return bytes.fromhex(file.read().strip().replace(b"-", b"").decode())
    except (OSError, ValueError):
        return SYNCED
