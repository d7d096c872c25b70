"""`loader.trace()`: a trace, from its beginning to its file.

Data path: beside the consumer.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from asyncloader.base.bridge import in_thread
from asyncloader.telemetry.recording import Recording, check_writable

if TYPE_CHECKING:
    from asyncloader.telemetry.statistics import Statistics


class Trace:
    """A trace of a loader, which `DataLoader.trace` has begun. As a context manager it ends with the block; after
    ``async with`` the file is written in a thread.
    """

    def __init__(self, statistics: Statistics, file: str | os.PathLike[str], loader: str, last: float | None) -> None:
        if last is not None and not last > 0:
            raise ValueError(f"last is a number of seconds above 0, got {last!r}")
        # Absolute: the program may change its directory before the file is written.
        path = Path(file).absolute()
        before = statistics.trace
        _check_free(before)
        check_writable(path)
        self._statistics = statistics
        self._file = path
        self._recording = Recording(loader, last, statistics.ring_copies, path)
        if not statistics.set_trace(before, self._recording):  # another thread has begun or ended one in between
            _check_free(statistics.trace)
            raise RuntimeError("another thread traces the loader at the same time: begin one trace after the other")

    @property
    def file(self) -> Path:
        """Where the trace is written when it ends."""
        return self._file

    def dump(self, file: str | os.PathLike[str] | None = None) -> Path:
        """Write the trace so far, and go on. Blocks for about three seconds for 10,000 batches. Any thread.

        Args:
            file: as in `DataLoader.trace`. Default: the trace's own file.

        Returns:
            The file.

        Raises:
            OSError: it cannot be written.
            ValueError: its name does not end with .json or .json.gz.
        """
        path = self.file if file is None else Path(file)
        if file is not None:
            check_writable(path)
        self._recording.dump(path)
        return path

    def close(self) -> None:
        """End the trace, and write its file. Idempotent.

        Raises:
            OSError: it cannot be written.
        """
        self._recording.finish(self._statistics)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await in_thread(partial(self._end, error))

    def _end(self, error: BaseException | None) -> None:
        try:
            self.close()
        except OSError as failed:
            if error is None:
                raise
            error.add_note(f"Its trace could not be written to {self.file}: {failed}")


def _check_free(current: Recording | None) -> None:
    if current is not None and current.owned:  # else it is a parent's, which goes on in the parent
        raise RuntimeError(f"the loader is being traced already, to {current.file}: end that trace first")
