"""`asyncloader try` runs programs as users write them, and says what our loader would gain."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from asyncloader.__main__ import main
from asyncloader.commands import try_command
from asyncloader.commands.summary import find_faults
from asyncloader.commands.try_command import ProgramRun, run_program

pytestmark = [pytest.mark.timeout(200), pytest.mark.spawns]

Write = Callable[[str], Path]

# In torch's loader a batch takes 40 ms: a gain that no busy machine hides.
HEAD = """
import asyncio, os, pathlib, sys, time, torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Numbers(Dataset):
    delay = 0
    def __len__(self): return 400
    def __getitem__(self, index): return torch.full((4,), float(index))

class Noise(Numbers):
    def __getitem__(self, index): return torch.rand(4)

class Slow(Dataset):
    def __len__(self): return 80
    def __getitem__(self, index):
        import asyncloader
        if type(loader) is DataLoader: time.sleep(0.01)
        return torch.full((4,), float(index))

def step(batch): model(batch).sum().backward()
model = torch.nn.Linear(4, 1)
"""
GAIN = """
torch.manual_seed(0)
if __name__ == "__main__":
    workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(Slow(), batch_size=4, shuffle=True, **workers)  # which Slow asks for
    validation = DataLoader(Numbers(), batch_size=200)
    while True:
        for batch in loader: step(batch)
        for batch in validation: model(batch)
"""
CONSUMER = """
if __name__ == "__main__":
    pathlib.Path("last.pt").touch()
    for batch in DataLoader(Numbers(), batch_size=4, shuffle=True):
        time.sleep(0.1)
        step(batch)
"""
RANKS = """
def train(rank):
    torch.manual_seed(0)
    sampler = DistributedSampler(Numbers(), 2, rank)
    loader = DataLoader(Noise(), batch_size=4, sampler=sampler, num_workers=1, persistent_workers=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader: step(batch)

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""
ASYNCIO = """
async def train(loader):
    iterator = iter(loader)
    while (batch := await asyncio.to_thread(next, iterator, None)) is not None: step(batch)

if __name__ == "__main__":
    asyncio.run(train(DataLoader(Numbers(), batch_size=4, num_workers=2)))
"""
ACCELERATE = """
from accelerate import Accelerator
if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Numbers(), batch_size=4, num_workers=1))
    for epoch in range(2):
        for batch in loader: step(batch)
"""
LIGHTNING = """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch): return self.layer(batch).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **quiet)
    trainer.fit(Module(), DataLoader(Numbers(), batch_size=4, num_workers=1))
"""
TRAINER = """
import transformers
class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x): return {"loss": self.layer(x).sum()}

if __name__ == "__main__":
    arguments = transformers.TrainingArguments(
        "out", num_train_epochs=2, per_device_train_batch_size=4, dataloader_num_workers=1, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )
    transformers.Trainer(Linear(), arguments, lambda each: {"x": torch.stack(each)}, Numbers()).train()
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Give a function that writes a program into the working directory, a new one."""
    monkeypatch.chdir(tmp_path)

    def write_program(text: str) -> Path:
        file = tmp_path / "train.py"
        file.write_text(HEAD + text)
        return file

    return write_program


def ran(file: Path, *, install: bool, options: dict[str, dict[str, Any]] | None = None) -> ProgramRun:
    plan = {"install": install, "options": options or {}}
    found = run_program([sys.executable, str(file)], plan, seconds=60, most=60, source=None)
    assert found.code == 0, found.errors
    return found


def test_a_gain(write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is the last line; the table names the loaders, and that the batches are equal. The loader with most batches
    judges, and has its line.
    """
    monkeypatch.setattr(try_command, "_NARROW", 10.0)
    write(GAIN)
    assert main(["try", "--seconds", "1.5", "--markdown", "--", sys.executable, "train.py"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"[\d.]+ times \([\d.]+ to [\d.]+; two runs of torch differ by \d+%.*\)", told[-1])
    assert any("train.py:26: DataLoader of torch, num_workers=1" in line and "it judges" in line for line in told)
    assert any("train.py:27: DataLoader of torch, num_workers=0" in line for line in told)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told if line.startswith("| ")]
    assert [row[0] for row in rows[:4]] == ["loader", "---", "torch", "asyncloader"]
    assert all(len(row) == 6 and row[4].endswith("MiB") and row[5] == "yes" for row in rows[2:4])


def test_no_gain_where_training_is_the_limit(write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The program waits for nothing; it draws without a seed, so that batches cannot be compared, and leaves a file."""
    write(CONSUMER)
    assert main(["try", "--seconds", "1.5", "--json", "--", sys.executable, "train.py"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["error"]) == (False, None)
    assert re.fullmatch(r"no gain: training waits \d% of the time", found["findings"][-1]["text"])
    assert any("the first run wrote last.pt" in each["text"] for each in found["findings"])
    runs = [each["figures"] for each in found["findings"] if each["name"] == "run"]
    assert [each["equal"] for each in runs] == ["not comparable: two runs of torch differ"] * 2
    assert 5 < runs[0]["rate"] < 10
    (tmp_path / "last.pt").unlink()
    assert main(["try", "--seconds", "1", "--cwd", ".", "--json", "--", sys.executable, "train.py"]) == 3
    assert not (tmp_path / "last.pt").exists()
    assert "wrote" not in capsys.readouterr().out


def test_ranks_are_child_processes(write: Write) -> None:
    """Each process records its loader, and makes one of ours where that is asked for; no fault is named falsely."""
    file = write(RANKS)
    for install in (False, True):
        found = ran(file, install=install)
        assert len(found.processes) == 2
        assert find_faults(found.processes, found.workers) == []  # equal seeds of ranks are none
        for each in found.processes:
            ((place, record),) = each.items()
            assert place.startswith("train.py:26")
            assert (record["ours"], record["batches"], record["begins"]) == (install, 100, 2)
            assert len(record["orders"]) == 2
            assert record["orders"][0] != record["orders"][1] or install


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(ASYNCIO, id="asyncio"),
        pytest.param(ACCELERATE, id="accelerate"),
        pytest.param(LIGHTNING, id="lightning"),
        pytest.param(TRAINER, id="transformers"),
    ],
)
@pytest.mark.thorough
def test_trainers_of_all_kinds(text: str, write: Write) -> None:
    """Get our loader, with the options of the run, and torch's batches."""
    package = re.search(r"accelerate|lightning|transformers", text)
    if package is not None and find_spec(package[0]) is None:
        pytest.skip(f"{package[0]} is not installed")
    file = write(text)
    run = ran(file, install=False)
    assert {each.name for each in find_faults(run.processes, run.workers)} <= {"workers start anew"}
    (theirs,) = run.processes
    (place,) = theirs
    (ours,) = ran(file, install=True, options={place: {"num_workers": 3}}).processes
    assert (theirs[place]["ours"], ours[place]["ours"], ours[place]["workers"]) == (False, True, 3)
    assert theirs[place]["batches"] == ours[place]["batches"] >= 100
    assert theirs[place]["digests"] == ours[place]["digests"]


def test_the_sitecustomize_that_is_shadowed_runs(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's, or the distribution's."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import os; os.environ['OWN'] = '1'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "own"), prepend=os.pathsep)
    found = ran(write("sys.exit(os.environ['OWN'] != '1')"), install=False)
    assert found.began


@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        ([], "give a program, as in: asyncloader try -- python train.py; or else module:make_loader"),
        (["--seconds", "0", "a:b"], "--seconds should be above 0 and at most 300, but got 0"),
        (["--", "no-such-program"], "[Errno 2] No such file or directory: 'no-such-program'"),
        (
            ["--", sys.executable, "-c", "pass"],
            "no DataLoader gave two batches: a program has 100 s until the first, and --seconds from then on",
        ),
        (
            ["--", sys.executable, "-I", "-c", "pass"],
            "no Python process ran sitecustomize, by which loaders are seen: leave out -I, -S and -E",
        ),
    ],
    ids=["nothing", "no time", "no program", "no loader", "isolated"],
)
def test_what_cannot_be_carried_out(arguments: list[str], last: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends with a line that says why, and with 2."""
    assert main(["try", *arguments]) == 2
    assert capsys.readouterr().err == f"asyncloader try: {last}\n"


def test_a_program_that_fails(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends the command with 1, and its own last line is the last."""
    write("raise RuntimeError('no data')")
    assert main(["try", "--", sys.executable, "train.py"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert "with torch's loader the program ended with exit code 1:" in told[0]
    assert told[-1] == "RuntimeError: no data"


def test_a_function_that_makes_a_loader(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Takes the place of a program. A loader of asyncloader is not compared with torch's."""
    write("def make():\n    from asyncloader import DataLoader\n    return DataLoader(Numbers(), batch_size=4)")
    assert main(["try", "--seconds", "0.5", "train.py:make"]) == 3
    told = capsys.readouterr().out
    assert "DataLoader of asyncloader, num_workers=0" in told
    assert "asyncloader as it is" in told


def test_an_interrupted_command_leaves_no_process(write: Write, tmp_path: Path) -> None:
    """Also none that ignores SIGTERM, and none in a session of its own, as torchrun's workers."""
    write(
        """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path("pids.new").write_text(f"{os.getpid()} {child.pid}")
os.mkfifo("never")
os.rename("pids.new", "pids")
open("never")
"""
    )
    os.mkfifo(tmp_path / "begun")
    command = [
        sys.executable,
        "-m",
        "asyncloader",
        "try",
        "--json",
        "--",
        "sh",
        "-c",
        f"{sys.executable} train.py & cat >begun </dev/null; wait",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trial:
        (tmp_path / "begun").read_text()  # waits for the shell
        while not (tmp_path / "pids").exists():
            assert trial.poll() is None
        trial.send_signal(signal.SIGINT)
        told, _ = trial.communicate(timeout=60)
    assert trial.returncode == 130
    assert json.loads(told)["error"] == "it was interrupted"
    for each in (tmp_path / "pids").read_text().split():
        assert not Path(f"/proc/{each}/stat").exists() or ") Z " in Path(f"/proc/{each}/stat").read_text()
