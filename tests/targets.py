"""Makes targets of the Makefile, each in a copy of the tracked files with an empty environment.

    make targets                         all of them; what takes long is cut short
    python3 -m tests.targets docs demo   these
    python3 -m tests.targets --unless-recorded docs demo

A target may work only because another has installed something for it. Targets that install the same, hence wait for
the same stamp, are made in one copy. Once all have passed, the digests of what says what is installed are written to
`targets.sha256`; with `--unless-recorded` all targets are made if one of them is another. Nothing is imported but the
standard library: it runs where nothing is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path

from tests.mutants import copy_tree

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_suffix(".sha256")
INPUTS = ("Makefile", "pyproject.toml", "constraints.txt")
OF_TOOLS = "\n[tool."  # from here on pyproject.toml has what installs nothing
COLLECTED = ["JOBS=0", "ARGS=--collect-only -qq"]
CUT_SHORT = {
    **dict.fromkeys(("test", "test-ci", "test-all", "test-rare", "test-integrations", "test-clients"), COLLECTED),
    **dict.fromkeys(("test-browser", "test-ray", "test-dataloader2-reference"), COLLECTED),
    "chaos": ["SEEDS=1"],
    "bench": ["ARGS=--no-save --quick --rounds 1 --rows shuffle"],
}
LEFT_OUT = {"help", "clean", "targets"}
# Variables of a make that runs this, and of an environment that is active.
NOT_PASSED_ON = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "VIRTUAL_ENV", "PYTHONPATH", "VENV"}


def targets() -> dict[str, str]:
    """Return the targets with the stamps that they wait for; with their own names if they wait for none."""
    line = re.compile(r"^([a-z][a-z0-9-]*):(?: \S*/\.stamp-([\w-]+))?.* ## ", re.MULTILINE)
    found = line.findall((ROOT / "Makefile").read_text())
    return {name: stamp or name for name, stamp in found if name not in LEFT_OUT}


def record() -> str:
    """Return the digests of the files that say what is installed, each with its name."""
    texts = {name: (ROOT / name).read_text().partition(OF_TOOLS)[0] for name in INPUTS}
    return "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in texts.items())


def made(names: list[str]) -> bool:
    """Make these targets in one copy. Returns whether all were made; prints the output of one that was not."""
    environment = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
    with tempfile.TemporaryDirectory(prefix="targets-") as folder:
        copy_tree(ROOT, Path(folder))
        for name in names:
            began = time.monotonic()
            process = subprocess.Popen(
                ["make", name, *CUT_SHORT.get(name, [])],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                said, _ = process.communicate()
            finally:
                with contextlib.suppress(ProcessLookupError):  # what is left of it after a signal to this process
                    os.killpg(process.pid, signal.SIGKILL)
            failed = f": failed with {process.returncode}\n{said[-20_000:]}" if process.returncode else ""
            print(f"{time.monotonic() - began:5.0f} s  make {name}{failed}", flush=True)
            if failed:
                return False
    return True


def main(arguments: list[str]) -> int:
    """Run the command. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.targets", description=__doc__)
    parser.add_argument("names", nargs="*", help="targets (all)")
    parser.add_argument("--unless-recorded", action="store_true", help="make all if what is installed has changed")
    options = parser.parse_args(arguments)
    stamps = targets()
    if unknown := set(options.names) - stamps.keys():
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(stamps)}")
    recorded = RECORD.exists() and RECORD.read_text() == record()
    everything = not options.names or (options.unless_recorded and not recorded)
    chosen = sorted(stamps if everything else options.names, key=stamps.__getitem__)
    if shutil.which("make") is None:
        parser.error("make is not installed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # folders are removed
    passed = [made(list(names)) for _, names in groupby(chosen, stamps.__getitem__)]
    if all(passed) and everything:
        RECORD.write_text(record())
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
