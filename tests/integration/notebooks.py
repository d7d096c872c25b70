"""Runs the cells of a notebook in a kernel, as `jupyter execute` does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

from tests.integration.running import PATIENCE_S, environment

__all__ = ["run_cells"]

# In a process of its own: the client leaves threads and sockets of zmq, which end with the process.
CLIENT = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


def run_cells(folder: Path, *cells: str) -> list[Any]:
    """Run the cells in one kernel; the outputs of each. A cell that raises fails the test, with its traceback."""
    file = folder / "cells.ipynb"
    new: Any = nbformat.v4
    file.write_text(new.writes(new.new_notebook(cells=[new.new_code_cell(cell) for cell in cells])))
    env = {
        **environment(),
        "PYTHONWARNINGS": "default",  # the kernel's own code has some
        **dict.fromkeys(["IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"], str(folder)),
    }
    command = [sys.executable, "-c", CLIENT, str(file)]
    client = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=3 * PATIENCE_S, env=env, cwd=folder
    )
    assert client.returncode == 0, client.stderr
    return [cell["outputs"] for cell in json.loads(file.read_text())["cells"]]
