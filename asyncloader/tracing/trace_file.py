"""Writes files of Chrome's trace events.

Data path: recording -> [trace_file] -> disk.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import threading
from contextlib import suppress
from pathlib import Path

from asyncloader.tracing.chrome import TraceEvents


def check_writable(file: Path) -> None:
    """Check that a file can be written, without changing it.

    Raises:
        OSError: it cannot.
        ValueError: its name is not that of a trace.
    """
    if not file.name.endswith((".json", ".json.gz")):
        raise ValueError(f"a trace is a file that ends with .json or .json.gz, not {str(file)!r}")
    if file.is_dir():
        raise IsADirectoryError(f"{str(file)!r} is a directory: a trace is a file")
    partial = _partial(file)
    partial.open("wb").close()
    partial.unlink()


def _partial(file: Path) -> Path:
    """The name under which this thread writes a file."""
    return file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}.partial")


def write(file: Path, trace: TraceEvents) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = _partial(file)
    try:
        with partial.open("wb") as raw:
            packed = gzip.GzipFile(file.name, "wb", 6, raw) if file.name.endswith(".gz") else raw
            text = io.TextIOWrapper(packed, encoding="utf-8")
            _write_events(text, trace)
            text.detach()  # flushes it, and leaves the file open
            if packed is not raw:
                packed.close()
        partial.replace(file)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _write_events(text: io.TextIOWrapper, trace: TraceEvents) -> None:
    # Event by event: one string of all would take as much memory as the file.
    text.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    encode = json.JSONEncoder(default=repr, separators=(",", ":")).encode
    comma = ""
    for event in trace.events:
        text.write(comma + encode(event))
        comma = ",\n"
    text.write(f'\n], "otherData": {json.dumps(trace.facts)}}}\n')
