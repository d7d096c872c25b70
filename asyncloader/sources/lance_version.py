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


def describe(lance: Any, **asked: Any) -> dict[str, Any]:
    """Return a version's ``version``, ``rows``, ``written`` (when), ``names`` of columns, and those of them that are
    ``blobs`` or ``hold_blobs`` deeper inside. Raises Lance's errors.

    Args:
        lance: the module.
        asked: ``uri``, ``version`` (None: the newest) and ``storage_options``.
    """
    found = lance.dataset(**asked)
    return {
        "version": found.version,
        "rows": found.count_rows(),
        "written": written(found),
        "names": found.schema.names,
        "blobs": [field.name for field in found.schema if _is_blob(field)],
        "hold_blobs": [field.name for field in found.schema if not _is_blob(field) and _holds_blobs(field)],
    }


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


if __name__ == "__main__":
    arguments = json.load(sys.stdin)
    sys.path[:] = arguments.pop("path")
    sys.stdout.write("\n" + json.dumps(describe(importlib.import_module("lance"), **arguments)))
