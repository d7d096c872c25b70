"""The batch script of the Slurm page runs, with programs of this machine in the places of Slurm's."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

from tests.docs.test_code_blocks import blocks
from tests.helpers.running import ROOT, environment

PAGE = ROOT / "docs" / "how-to" / "serve-on-slurm.md"

# The stand-in for `srun` accepts only the options of the page, and passes signals to its command as Slurm's does.
SRUN = """#!/bin/bash
while [[ "$1" == --het-group=* || "$1" == --kill-on-bad-exit=0 ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
[[ "$1 $2" == "show hostnames" ]] || exit 1
echo "$3" | tr , '\\n'
"""
ASYNCLOADER = f"""#!/bin/bash
exec {sys.executable} -m asyncloader "$@"
"""
TORCHRUN = f"""#!/bin/bash
echo "$@" > torchrun.arguments
exec {sys.executable} "${{!#}}"
"""
DATA = """
import asyncloader
from torch.utils.data import Dataset


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index**2


@asyncloader.definition
def train(root: str):
    assert root == "/data"
    return Squares()
"""
TRAIN = """
import os
from pathlib import Path

from data import train

import asyncloader

if __name__ == "__main__":
    Path("token.mode").write_text(oct(os.stat(os.environ["ASYNCLOADER_TOKEN_FILE"]).st_mode & 0o777))
    workers = asyncloader.Service(os.environ["WORKERS"], wait=60)
    with asyncloader.DataLoader(train(root="/data"), 4, seed=1, num_workers=2, workers=workers) as loader:
        Path("batches").write_text(repr([batch.tolist() for batch in loader]))
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_the_script(tmp_path: Path) -> None:
    """It starts a node and the trainer, which finds the node and proves its token; at the end the token is removed."""
    (script,) = [block.text for block in blocks(PAGE.read_text()) if block.language == "bash"]
    programs = {"srun": SRUN, "scontrol": SCONTROL, "asyncloader": ASYNCLOADER, "torchrun": TORCHRUN}
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        program = tmp_path / "bin" / name
        program.write_text(text)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    for name, text in {"data.py": DATA, "train.py": TRAIN, "train.sbatch": script}.items():
        # Two names of this machine, and a free port.
        (tmp_path / name).write_text(text.replace("7070", str(free_port())))
    groups = {"HET_GROUP_0": "localhost", "HET_GROUP_1": "localhost,127.0.0.1"}
    slurm = {f"SLURM_JOB_NODELIST_{name}": hosts for name, hosts in groups.items()} | {"SLURM_JOB_ID": "77"}
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "train.sbatch"],
        cwd=tmp_path,
        env=environment() | slurm | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "batches").read_text() == repr([[0, 1, 4, 9], [16, 25, 36, 49], [64, 81, 100, 121]])
    assert (tmp_path / "token.mode").read_text() == "0o600"
    assert not list(tmp_path.glob(".token*"))
    assert "--rdzv-endpoint localhost:29500 train.py" in (tmp_path / "torchrun.arguments").read_text()
