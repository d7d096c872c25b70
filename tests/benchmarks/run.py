"""The benchmark's command as a script: `python tests/benchmarks/run.py` is `python -m tests.benchmarks`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    # A script's folder heads the path; the package is found from the checkout's root.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    runpy.run_module("tests.benchmarks", run_name="__main__", alter_sys=True)
