"""`workers="shared"`: one node for the processes of a run, started by the first of them, ended after the last."""

from __future__ import annotations

import json
import os
import signal
import uuid
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import PATIENCE_S, Deaths, Script, run_script

DATA = """
import os, torch, asyncloader
from torch.utils.data import Dataset

class Noise(Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, index): return index, os.getpid(), torch.rand(8)

@asyncloader.definition
def train(n: int = 100):
    return Noise(n)
"""
RANK = """
import json, os, sys, zlib
import psutil
from asyncloader import DataLoader

{head}

def said(batches):
    workers = sorted({{pid for batch in batches for pid in batch[1].tolist()}})
    node = {workers} and psutil.Process(int(batches[-1][1][0])).parent().parent().pid  # a fork server is in between
    values = [(batch[0].tolist(), zlib.crc32(batch[2].numpy().tobytes())) for batch in batches]
    told = json.dumps({{"pid": os.getpid(), "node": node, "workers": workers, "values": values}})
    print(told + "\\n", end="", flush=True)  # in one write: the ranks share a pipe

if __name__ == "__main__":
    options = dict(batch_size=4, seed=1, num_workers=2, workers={workers})
    with DataLoader(train(n=400), **options) as loader:
        batches = iter(loader)
        said([next(batches), next(batches)])
        if {waits}:
            sys.stdin.readline()
        said(list(batches))
"""
FROM_DATA = "from data import train"


def rank(workers: str = "'shared'", head: str = FROM_DATA, *, waits: bool = False) -> str:
    return RANK.format(head=head, workers=workers, waits=waits)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder and the environment of a run, as torchrun would."""
    (tmp_path / "data.py").write_text(DATA)
    for name, value in {"TORCHELASTIC_RUN_ID": uuid.uuid4().hex, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def folder(run: Path, name: str, data: str = DATA) -> Path:
    made = run / name
    made.mkdir()
    (made / "data.py").write_text(data)
    return made


@pytest.mark.thorough
def test_two_ranks(run: Path) -> None:
    """They use the same worker processes, get the batches of local workers, and leave no process behind. (The page on
    several ranks runs torchrun itself.)
    """
    with ExitStack() as stack:
        source = rank(head=DATA)  # in one file, as in many programs
        ranks = [stack.enter_context(closing_script(folder(run, name), source)) for name in ("first", "second")]
        outputs = [each.finish() for each in ranks]
        assert [each.process.returncode for each in ranks] == [0, 0], outputs
    told = [json.loads(line) for output, _ in outputs for line in output.splitlines()]
    assert len(told) == 4
    assert len({each["node"] for each in told}) == 1
    local = run_script(run, rank("None"))
    expected = [pair for line in local.stdout.splitlines() for pair in json.loads(line)["values"]]
    for pid in {each["pid"] for each in told}:
        assert [pair for each in told if each["pid"] == pid for pair in each["values"]] == expected
    assert_gone(told[0]["node"], *told[0]["workers"])


def assert_gone(*pids: int) -> None:
    for pid in pids:
        try:
            ends = Deaths([pid])
        except ProcessLookupError:
            continue
        ends.wait()


def test_the_first_is_killed(run: Path) -> None:
    """The node stays for the other rank, whose epoch goes on; it ends with that rank, also if that is killed."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(closing_script(folder(run, name), rank(waits=True))) for name in ("first", "second")
        )
        told = json.loads(first.line())
        assert json.loads(second.line())["node"] == told["node"]
        with Deaths([told["node"], *told["workers"]]) as ends:
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(PATIENCE_S)
            second.process.stdin.write("\n")
            second.process.stdin.flush()
            assert len(json.loads(second.line())["values"]) == 98
            assert not ends.ended()
            second.process.send_signal(signal.SIGKILL)
            ends.wait()


def test_the_node_is_killed(run: Path) -> None:
    """The loader starts another node, and goes on where it was."""
    with closing_script(run, rank(waits=True)) as only:
        told = json.loads(only.line())
        with Deaths(told["workers"]) as ends:  # they end with it, and have written into the loader's ring until then
            os.kill(told["node"], signal.SIGKILL)
            ends.wait()
        only.process.stdin.write("\n")
        only.process.stdin.flush()
        after = json.loads(only.line())
        assert after["node"] != told["node"]
        assert [index for batch in (told["values"] + after["values"]) for index in batch[0]] == list(range(400))
        with Deaths([after["node"]]) as ends:
            only.finish()
            ends.wait()


def closing_script(where: Path, source: str) -> Any:
    return closing(Script(where, source))


MISTAKES = {
    "no torchrun": (rank(), DATA, "", "TORCHELASTIC_RUN_ID is not set: start the program with torchrun, or start"),
    "a program without a guard": (
        rank(head=DATA).replace('if __name__ == "__main__"', "if True"),
        DATA,
        "run",
        "imports the module that has train. A worker that is spawned",
    ),
    "a module that cannot be imported": (
        rank(),
        DATA + "\nif 'TORCHELASTIC_RUN_ID' not in os.environ: raise OSError('no disk')",
        "run",
        "its node cannot import data:train: OSError: no disk",
    ),
    "a definition without a module": (
        rank(head=DATA + "\ndel __file__"),
        DATA,
        "run",
        "train is defined in a session, where no node finds it: put it into a module",
    ),
}


@pytest.mark.parametrize(("source", "data", "run_id", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(source: str, data: str, run_id: str, text: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error's last line names the remedy."""
    (run / "data.py").write_text(data)
    if not run_id:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    done = run_script(run, source)
    assert done.returncode == 1
    assert text in done.stderr.splitlines()[-1]


def test_a_rank_whose_definition_differs(run: Path) -> None:
    """It is refused: its samples would differ."""
    with closing_script(folder(run, "first"), rank(waits=True)) as first:
        first.line()
        done = run_script(folder(run, "second", DATA.replace("n: int = 100", "n: int = 99")), rank())
        assert "the definition train differs: its source has the fingerprint" in done.stderr.splitlines()[-1]
