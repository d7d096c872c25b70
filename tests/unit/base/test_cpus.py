from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asyncloader.base import cpus
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


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "20000 100000\n"}, 1),
        (
            "4:memory:/m\n2:cpu,cpuacct:/a\n0::/\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
            3,
        ),
        (
            "1:cpu:/a/b\n",
            {
                "cpu/a/b/cpu.cfs_quota_us": "-1\n",
                "cpu/a/b/cpu.cfs_period_us": "100000\n",
                "cpu/cpu.cfs_quota_us": "500000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        ("3:cpuset:/a\n", {"a/cpu.max": "100000 100000\n"}, None),
        (None, {"cpu.max": "100000 100000\n"}, None),
        *[("0::/\n", {"cpu.max": text}, None) for text in ("50000 0", "much 100000", "-5 100000", "100000")],
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_tightest_quota_counts(
    own: str | None, files: dict[str, str], quota: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the control group and those above it, of either version; rounded up. None where nothing says one, or what
    says it is no number of CPUs, as some containers show it.
    """
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(cpus, "_OWN_GROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(cpus, "_GROUPS", str(tmp_path / "groups"))
    assert cpus.cpu_quota() == quota
