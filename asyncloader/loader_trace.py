"""Begins and ends the trace of a loader, for both loaders.

Data path: beside the consumer.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

from asyncloader.explain import diagnose_run
from asyncloader.options.declaration import LoaderSpec
from asyncloader.telemetry.statistics import Statistics

if TYPE_CHECKING:
    from asyncloader.tracing.trace import Trace


def begin_trace(
    name: str, spec: LoaderSpec[Any], statistics: Statistics, file: str | os.PathLike[str], last: float | None
) -> Trace:
    """Begin a trace. `name`: of the loader's class. The rest: see `DataLoader.trace`."""
    from asyncloader.tracing.trace import Trace  # late: few loaders are traced

    # The statistics refer to the trace, which must keep neither them nor the loader.
    known, counted = weakref.ref(spec), weakref.ref(statistics)

    def verdict() -> str | None:
        loader, run = known(), counted()
        return None if loader is None or run is None else diagnose_run(loader, run).bound

    return Trace(statistics, file, name, last, verdict)


def finish_trace(statistics: Statistics) -> None:
    """End the loader's trace, if it has one, and write its file. Blocks.

    Raises:
        OSError: it cannot be written.
    """
    if statistics.trace is not None:
        from asyncloader.tracing.trace import end_trace

        end_trace(statistics)
