from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.helpers.running import ROOT

SCRIPT = """
import threading

import torch

from asyncloader.delivery.stage import Stage

found = []


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class Noting(Stage):
    def prepare(self, answer):
        raise AssertionError

    def finish(self):
        found.append(torch.get_num_threads())


torch.set_num_threads(3)
Noting("stage", found.append).close()
in_thread(lambda: found.append(torch.get_num_threads()))
found.append(torch.get_num_threads())
print(found)
"""


@pytest.mark.thorough
def test_a_stage_computes_on_one_core_and_nobody_else_does() -> None:
    """Threads that are made later, and the calling thread, which has computed nothing yet, keep their number."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    openmp = "OpenMP" in torch.__config__.parallel_info().partition("\n")[2]
    assert done.stdout.strip() == ("[1, 3, 3]" if openmp else "[3, 3, 3]"), done.stderr
