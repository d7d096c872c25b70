"""Looks up a version of a Lance dataset. Also a program, which a process that must not use lance starts.

Data path: lance -> [lance_version] -> lance_table.

The program imports nothing of this package, so that it starts quickly. It reads one JSON object, of the arguments of
`describe` and ``path``, where modules are found; the last line that it writes is the answer as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def describe(lance: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Return a version's ``version``, ``rows`` and ``names`` of columns; or an ``error``.

    Args:
        lance: the module.
        asked: ``uri``, ``version`` (None: the newest) and ``storage_options``.
    """
    try:
        found = lance.dataset(asked["uri"], version=asked["version"], storage_options=asked["storage_options"])
        return {"version": found.version, "rows": found.count_rows(), "names": found.schema.names}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


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
