"""The remote demo keeps its promises: it trains from a slow store, is killed, and ends as an undisturbed run does."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import pytest

from tests.docs.examples import EXAMPLES, PATIENTLY, environment, run_example

STORE = EXAMPLES / "slow_store.py"

pytestmark = [pytest.mark.slow, pytest.mark.network, PATIENTLY]


def test_killed_run_ends_like_the_other(tmp_path: Path) -> None:
    """In two epochs a state from before the kill is found, the batches after it are repeated, and every fact holds."""
    output = run_example("remote_digits.py", tmp_path / "digits", "--epochs", "2")

    again = re.search(r"it went on from batch (\d+); the (\d+) after it were trained again", output)
    assert again
    resumed, repeated = map(int, again.groups())
    killed = re.search(r"killed after (\d+) batches", output)
    assert killed
    assert 0 < resumed < int(killed[1]) == resumed + repeated

    assert re.findall(r"^  (\S+) +(?=each|the)", output, re.MULTILINE) == ["yes"] * 4
    digests = re.search(r"digests of the keys (\w{16}) and (\w{16})$", output, re.MULTILINE)
    assert digests
    assert digests[1] == digests[2]
    # Not a terminal: a line at the end of each epoch of the whole run, and of each epoch of the other run.
    assert len(re.findall(r"^  epoch +\d+/2 \[", output, re.MULTILINE)) >= 4

    names: set[str] = set()
    for shard in (tmp_path / "digits").iterdir():
        with tarfile.open(shard) as tar:
            names.update(tar.getnames())
    assert len(names) == 2 * 1437


def test_facts_that_do_not_hold_are_told(tmp_path: Path) -> None:
    """A run that lost a sample, or that ended with other weights, is reported as different."""
    program = """
import copy, sys, torch, remote_digits as demo
keys = demo.split()[0]
whole = {"seen": [list(keys)], "network": demo.make_network().state_dict()}
assert demo.compare(whole, copy.deepcopy(whole), 1)
for spoil in (lambda run: run["seen"][0].pop(), lambda run: run["seen"][0].append(keys[0]),
              lambda run: run["seen"].append(list(keys)), lambda run: run["seen"][0].reverse(),
              lambda run: next(iter(run["network"].values())).add_(1e-6)):
    other = copy.deepcopy(whole)
    spoil(other)
    assert not demo.compare(whole, other, 1)
"""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment(EXAMPLES), capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (
        ran.stdout.count("NO ") == 3 * 2 + 1 + 1
    )  # other samples are also another order; order and weights stand alone


def test_store_serves_ranges_late(tmp_path: Path) -> None:
    """The store answers with the bytes that were asked for, and exits with its standard input."""
    (tmp_path / "object").write_bytes(bytes(range(256)))
    command = [sys.executable, "-W", "error", str(STORE), str(tmp_path), "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdin is not None
        assert store.stdout is not None
        url = store.stdout.readline().strip()
        asked = urllib.request.Request(f"{url}/object", headers={"Range": "bytes=16-31"})
        with urllib.request.urlopen(asked) as answer:
            assert (answer.status, answer.read()) == (206, bytes(range(16, 32)))
            assert answer.headers["ETag"]
        store.stdin.close()
        assert store.wait(60) == 0
