"""The inputs of `tests.stress.wire`, guided by the lines that they reach. Needs atheris.

    pip install atheris==3.0.0
    python -m tests.stress.guided value corpus -runs=1000000    # libFuzzer's own options; 1 if anything went wrong

The first argument names a reader that needs no node, the second a folder for the inputs that reached new lines. Without
atheris, this cannot be run; `tests.stress.wire` draws inputs anywhere.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

WATCHED = ["asyncloader.service", "asyncloader.workers.ipc", "asyncloader.workers.ipc"]


def main(arguments: list[str]) -> None:
    """Run until libFuzzer ends the process."""
    name, folder, *options = arguments
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=WATCHED):
        wire: Any = importlib.import_module("tests.stress.wire")
    target = wire.targets(None)[name]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, original in enumerate(target.originals):
        Path(folder, f"original-{number}").write_bytes(original.joined(original.parts))

    def read(data: bytes) -> None:
        with suppress(wire.REFUSALS):
            target.read(data)

    atheris.Setup([sys.argv[0], folder, *options], read)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
