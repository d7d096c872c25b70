"""Looks up a version of a Lance dataset. Also a program, which a process that must not use lance starts.

Data path: lance -> [lance_version] -> lance_table.

The program imports nothing of this package, so that it starts quickly. It reads one JSON object, of the arguments of
`describe` and ``path``, where modules are found; the last line that it writes is the answer as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from datetime import UTC, datetime
from typing import Any


def describe(lance: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Return a version's ``version``, ``rows``, ``written`` (when), ``names`` of columns, and those of them that are
    ``blobs`` or ``hold_blobs`` deeper inside; or an ``error``.

    Args:
        lance: the module.
        asked: ``uri``, ``version`` (None: the newest) and ``storage_options``.
    """
    try:
        found = lance.dataset(asked["uri"], version=asked["version"], storage_options=asked["storage_options"])
        return {
            "version": found.version,
            "rows": found.count_rows(),
            "written": written(found),
            "names": found.schema.names,
            "blobs": [field.name for field in found.schema if _is_blob(field)],
            "hold_blobs": [field.name for field in found.schema if not _is_blob(field) and _holds_blobs(field)],
        }
    except BaseException as error:
        if not is_failure(error):
            raise
        return {"error": f"{type(error).__name__}: {error}"}


def is_failure(error: BaseException) -> bool:
    """Return whether an error is one of Lance's. Damaged files may cause a panic of Rust, which is no `Exception`: the
    worker would end by it.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def written(dataset: Any) -> str:
    """Return when the open version was written, which its manifest says: a dataset that is deleted and made anew may
    have a version of the same number.
    """
    moment: datetime = dataset.get_version()["timestamp"]  # of the time zone of this machine, which nodes may not share
    return moment.astimezone(UTC).isoformat()


def _is_blob(field: Any) -> bool:
    name = getattr(field.type, "extension_name", "")
    return name == "lance.blob.v2" or (field.metadata or {}).get(b"lance-encoding:blob") == b"true"


def _holds_blobs(field: Any) -> bool:
    kind = field.type
    # Lists have a field too, of their items, and extensions none.
    inner = [kind.field(number) for number in range(kind.num_fields)] if hasattr(kind, "field") else []
    return _is_blob(field) or any(map(_holds_blobs, inner))


def _main() -> None:
    asked = json.load(sys.stdin)
    sys.path[:] = asked["path"]
    try:
        lance = importlib.import_module("lance")
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    else:
        answer = describe(lance, asked)
    sys.stdout.write("\n" + json.dumps(answer))


if __name__ == "__main__":
    _main()
