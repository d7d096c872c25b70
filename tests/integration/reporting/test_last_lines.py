"""The commonest mistakes, each as a program: the last line that it prints names the remedy.

The program of each case is run as a user runs it. `{file}` stands for the program's path in the expected line, and
`{folder}` for its folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests import script_server
from tests.helpers.running import environment

GUARD = (
    "asyncloader.errors.WorkerDied: DataLoader worker (pid(s) N) exited unexpectedly: worker N, exit code N. A worker "
    "that is spawned, or comes from a fork server, imports {file}, which makes a loader and reads it while it is "
    'imported. Put what the program does under `if __name__ == "__main__":`, or use {fork}.'
)
FORK = (
    'multiprocessing_context="fork", the default on Linux before Python 3.14: a worker may then hang if another thread '
    "of the program holds a lock as it is forked, and cannot use CUDA if the program has used it"
)
UNPICKLABLE = (
    "{part} = {value} cannot be pickled, as all that goes to workers must be unless they are forked. Define functions "
    "and classes at the top of a module, open files and connections at the first sample, or use {fork}"
)
NOT_THERE = (
    "a worker that is spawned, or comes from a fork server, imports {file}, and finds there nothing that is defined "
    'under `if __name__ == "__main__":` or in a function. Define it at the top of a module, or use {fork}'
)
IMPORT_FAILED = (
    "asyncloader.errors.WorkerDied: DataLoader worker (pid(s) N) exited unexpectedly: worker N, exit code N. It "
    "imports {file} first: what that raised is above. Put all that a worker cannot do, such as reading a loader, under "
    '`if __name__ == "__main__":`.'
)
FIXED = "ValueError: seed is fixed when a loader is made; clone(seed=...) makes another one"
USE_SYNC = (
    "TypeError: AsyncDataLoader is read with 'async for'; for a plain 'for' make an asyncloader.DataLoader, which "
    "takes the same arguments"
)
USE_ASYNC = (
    "TypeError: DataLoader is read with a plain 'for', which blocks; for 'async for' make an "
    "asyncloader.AsyncDataLoader, which takes the same arguments"
)
MISSING = "asyncloader.transports.errors.ObjectNotFound: '{folder}/none/x-000.tar' does not exist"
EXTENSION = (
    "ValueError: the extension of 'x.csv' says no format. Known are .tar, .jsonl, .ndjson, .tfrecord, "
    ".tfrecords, .mds, .tgz, .parquet, all but the last also with .gz or .zst. If it is one of them all the same, give "
    'format=, such as format="tar"; rename it or convert it otherwise'
)
SESSION = (
    "ImportError: Map is defined in __main__ of a session, which a spawned worker cannot import: put it into a module "
    "that can be imported, pip install 'asyncloader[notebook]', or use {fork}"
)


class Mistake(NamedTuple):
    """A program; its last line; the most lines that it prints; its treatment of warnings."""

    program: str
    last: str
    lines: int = 12
    warnings: str = "error"


IMPORTS = "import asyncio\nfrom asyncloader import AsyncDataLoader, DataLoader, Recovery, RemoteIterableDataset\n"
READ = "async def main():\n    async for _ in {}: pass\nasyncio.run(main())\n"
FAILING = """
from torch.utils.data import IterableDataset
class Stream(IterableDataset):
    def __iter__(self):
        yield 1
        raise ValueError("broken")
"""
MAP = """
class Map:
    def __len__(self): return 4
    def __getitem__(self, index): return [1, 2][index]
"""

MISTAKES = {
    "for over the async loader": Mistake("for _ in AsyncDataLoader(list(range(9))): pass", USE_SYNC),
    "async for over the sync loader": Mistake(READ.format("DataLoader(list(range(9)))"), USE_ASYNC, 18),
    "an option set afterwards": Mistake("DataLoader(list(range(9))).seed = 3", FIXED),
    "an option of the async loader set afterwards": Mistake("AsyncDataLoader(list(range(9))).seed = 3", FIXED),
    "a missing shard": Mistake(
        'for _ in DataLoader(RemoteIterableDataset("none/x-{000..003}.tar")): pass', MISSING, 24
    ),
    "a shard of no known format": Mistake('for _ in DataLoader(RemoteIterableDataset("x.csv")): pass', EXTENSION, 70),
    "a failing stream": Mistake(f"{FAILING}\nfor _ in DataLoader(Stream()): pass", "ValueError: broken", 7),
    "a failing stream, async": Mistake(FAILING + READ.format("AsyncDataLoader(Stream())"), "ValueError: broken", 18),
    "a failing stream in a worker": Mistake(
        f"{FAILING}\nfor _ in DataLoader(Stream(), num_workers=1): pass",
        "while reading sample number N of worker N's stream, in worker N (pid N)",
        11,
    ),
    "a failing sample": Mistake(
        f"{MAP}\nfor _ in DataLoader(Map()): pass", "while fetching sample index N (item N of the batch)", 8
    ),
    "a failing sample in a worker": Mistake(
        f"{MAP}\nfor _ in DataLoader(Map(), num_workers=1): pass",
        "while fetching sample index N (item N of the batch), in worker N (pid N)",
        11,
    ),
}


AWAITABLE = """
class Awaitable:
    def __len__(self): return 4
    def __getitem__(self, index): return self.get(index)
    async def get(self, index): return index
"""
STATE = "state = DataLoader(list(range(9)), seed=1).state_dict()\n"
SERVER = """
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
class Empty(BaseHTTPRequestHandler):
    def do_GET(self): self.send_error(404)
    def log_message(self, *_): pass
server = HTTPServer(("127.0.0.1", 0), Empty)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/x.tar"
"""
DIES = """
import ctypes, os, signal, time
class Dies:
    def __len__(self): return 4
    def __getitem__(self, index): {}
"""
RECOVER = (
    "To have a worker that dies replaced, and its tasks done again, set max_worker_restarts (with seed= the "
    "batches are "
    "exactly those of an undisturbed run)."
)

OF_OPTIONS = {
    "a misspelt option": Mistake(
        "DataLoader([5], num_worker=2)",
        "TypeError: DataLoader.__init__() got an unexpected keyword argument 'num_worker'. Did you mean 'num_workers'?",
    ),
    "a number as text": Mistake(
        'DataLoader([5], num_workers="Auto")',
        "TypeError: num_workers should be an integer or 'auto', but got num_workers='Auto'",
    ),
    "timeout without workers": Mistake(
        "iter(DataLoader([5], timeout=3))", "timeout=3 needs workers: set num_workers, or leave it at 0", 20
    ),
    "seed beside generator": Mistake(
        "import torch\nDataLoader([5], seed=1, generator=torch.Generator())",
        "ValueError: seed=1 and generator exclude one another: with a seed no generator is drawn from. Leave one out",
    ),
    "ranks without a seed": Mistake(
        "DataLoader([5], rank=0, world_size=2)",
        "ValueError: rank=0 and world_size=2 need seed=: without it the loader is torch's, which leaves sharding "
        "to the "
        "sampler (torch's DistributedSampler)",
    ),
    "a policy that there is not": Mistake(
        'DataLoader([5], on_error="ignore")',
        "ValueError: on_error should be 'raise', 'skip', 'refill' or a function of an index and an exception, but got "
        "on_error='ignore'",
    ),
    "a decode that is awaited": Mistake(
        "async def decode(sample): ...\nDataLoader([5], decode=decode)",
        "TypeError: decode=<function decode at 0> is a coroutine function, but decode is called, and not "
        "awaited: it is "
        "for work that takes a CPU. Await in the dataset's own methods instead",
        15,
    ),
    "an option that can do nothing": Mistake(
        "DataLoader([5], recovery=Recovery(max_skipped_samples=10))",
        "asyncloader.errors.NoEffectWarning: max_skipped_samples=10 does nothing with on_error='raise', which raises "
        "the first sample's error. Set on_error='skip', 'refill' or a function",
    ),
    "no such device": Mistake(
        'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = ""\niter(DataLoader([5], device="cuda"))',
        f"asyncloader.errors.DeviceUnavailable: device='cuda' cannot be used: torch {torch.__version__} sees no CUDA "
        "device, or was built without. Choose another device, or leave device= out.",
    ),
}
OF_SAMPLES = {
    "samples of different sizes": Mistake(
        "import torch\nfor _ in DataLoader([torch.zeros(3), torch.zeros(4)], batch_size=2): pass",
        "while collating the batch of indices [0, 1] (samples of different sizes need a collate_fn that pads or crops)",
    ),
    "samples of a type of one's own": Mistake(
        "for _ in DataLoader([object()]): pass",
        "while collating the batch of indices [0] (samples of this type need a collate_fn)",
    ),
    "a method that returns a coroutine": Mistake(
        f"{AWAITABLE}\nfor _ in DataLoader(Awaitable(), num_workers=1): pass",
        "while collating the batch of indices [0] (a dataset whose samples are awaited needs an `async def "
        "__getitem__`), in worker 0 (pid 1)",
        26,
    ),
    "an index out of range": Mistake(
        "for _ in DataLoader([5, 6], sampler=[0, 7]): pass", "while fetching sample index 7 (item 0 of the batch)", 30
    ),
    "too many bad samples": Mistake(
        f'{MAP}\nfor _ in DataLoader(Map(), on_error="skip", recovery=Recovery(max_skipped_samples=1)): pass',
        "asyncloader.errors.TooManySkippedSamples: more than max_skipped_samples=1 samples of this epoch raised, the "
        "last one: "
        "index 3, IndexError: list index out of range. Look at loader.skipped_samples, mend the dataset, or raise "
        "max_skipped_samples (None: no limit).",
        15,
    ),
}
OF_WORKERS = {
    "worker_init_fn raises": Mistake(
        'def init(worker): raise KeyError("config")\n'
        "for _ in DataLoader([5], num_workers=1, worker_init_fn=init): pass",
        "while calling worker_init_fn(0), in worker 0 (pid 1)",
    ),
    "a worker is killed": Mistake(
        f"{DIES.format('os.kill(os.getpid(), signal.SIGKILL)')}\nfor _ in DataLoader(Dies(), num_workers=1): pass",
        "asyncloader.errors.WorkerDied: DataLoader worker (pid 1) is killed by signal: Killed. It was worker 0 of the "
        f"loader; the kernel does this when memory runs out (see dmesg). It was at the task for indices [0]. {RECOVER}",
    ),
    "a worker crashes": Mistake(
        f"{DIES.format('ctypes.string_at(0)')}\nfor _ in DataLoader(Dies(), num_workers=1): pass",
        f"It was worker 0 of the loader. It was at the task for indices [0]. {RECOVER}",
        22,
    ),
    "a worker hangs": Mistake(
        f"{DIES.format('time.sleep(60)')}\nfor _ in DataLoader(Dies(), num_workers=1, timeout=0.5): pass",
        "See above in which call worker 0 is with task 0. If it is only slow, raise timeout.",
        22,
    ),
}
OF_LIFETIMES = {
    "a state of another seed": Mistake(
        f"{STATE}DataLoader(list(range(9)), seed=2).load_state_dict(state)",
        "asyncloader.errors.StateError: the state was saved with seed=1, but this loader has seed=2; make the "
        "loader as "
        "it was, or begin anew without the state",
    ),
    "a state of other ranks": Mistake(
        "loader = DataLoader(list(range(9)), 4, seed=1)\nnext(iter(loader))\nstate = loader.state_dict()\n"
        "DataLoader(list(range(9)), 3, seed=1, rank=0, world_size=2).load_state_dict(state)",
        "asyncloader.errors.StateError: the state was saved with a global batch of 4 samples, but this "
        "loader's is 6; use batch_size=2 on 2 ranks, or a global batch that divides the 4 samples that were delivered",
    ),
    "a state of a model": Mistake(
        'DataLoader([5]).load_state_dict({"weight": 1})',
        "asyncloader.errors.StateError: this is not a state of asyncloader: it has no 'version'; give what a loader's "
        "state_dict() returned",
    ),
    "a batch is not awaited": Mistake(
        "async def main():\n    anext(aiter(AsyncDataLoader([5])))\nasyncio.run(main())\nraise SystemExit(1)",
        "RuntimeWarning: coroutine 'AsyncInlineIterator.__anext__' was never awaited",
    ),
    "a closed loader": Mistake(
        "loader = DataLoader([5])\nloader.close()\nfor _ in loader: pass",
        "asyncloader.errors.LoaderClosed: <DataLoader of list: batch_size=1, sampler=SequentialSampler, num_workers=0, "
        "seed=None; closed> is closed; make a new loader to iterate again",
    ),
    "an iterator in a forked child": Mistake(
        "import os\nbatches = iter(DataLoader(list(range(99)), num_workers=1))\nnext(batches)\nif child := os.fork():\n"
        "    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\nnext(batches)",
        "asyncloader.errors.LoaderClosed: this iterator belongs to the process that this one was forked from; "
        "make a new "
        "one",
    ),
}
OF_SHARDS = {
    "a scheme that there is not": Mistake(
        'for _ in DataLoader(RemoteIterableDataset("gs3://b/x.tar")): pass',
        "asyncloader.transports.errors.UnknownScheme: no transport serves the scheme 'gs3'; known are: abfs, "
        "abfss, adl, "
        "az, azure, file, gs, hf, http, https, memory, s3, s3a. A package can add it by an entry point in the group "
        "'asyncloader.transports'",
    ),
    "an extra that is not installed": Mistake(
        'import sys\nsys.modules["obstore"] = None\nfor _ in DataLoader(RemoteIterableDataset("s3://b/x.tar")): pass',
        "asyncloader.transports.errors.TransportError: s3, gs and az need obstore, which is not installed; install it "
        "by: pip install 'asyncloader[s3]'",
        14,
    ),
    "a range without an end": Mistake(
        'for _ in DataLoader(RemoteIterableDataset("x-{000..}.tar")): pass',
        "ValueError: '{000..}' in 'x-{000..}.tar' is no range of numbers such as {000..127}",
        50,
    ),
    "a shard that the server has not": Mistake(
        f"{SERVER}\nfor _ in DataLoader(RemoteIterableDataset(url)): pass",
        "asyncloader.transports.errors.ObjectNotFound: 'x.tar' does not exist: http://127.0.0.1:1/x.tar answered "
        "404 Not "
        "Found",
    ),
    "a folder in a shard's place": Mistake(
        'import os\nos.mkdir("x.tar")\nfor _ in DataLoader(RemoteIterableDataset("x.tar")): pass',
        "asyncloader.transports.errors.ObjectNotFound: '{folder}/x.tar' is not a regular file",
    ),
    "a folder without shards": Mistake(
        'import os\nos.mkdir("shards")\nfor _ in DataLoader(RemoteIterableDataset("shards/")): pass',
        "ValueError: there is no shard below 'shards/'. Is the address right?",
        50,
    ),
    "a shard that is no tar": Mistake(
        'open("x.tar", "w").write("hello" * 999)\nfor _ in DataLoader(RemoteIterableDataset("x.tar")): pass',
        "asyncloader.errors.ShardError: not a tar header: its checksum is wrong (x.tar at byte 0)",
    ),
}

IMPORTS_2 = """
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.iter.sharding import SHARDING_PRIORITIES
from asyncloader.dataloader2 import DataLoader2, MultiProcessingReadingService
"""
FORKSERVER = 'num_workers=1, multiprocessing_context="forkserver"'
READ_2 = "for _ in DataLoader2({}, reading_service=MultiProcessingReadingService(1, 'forkserver')): pass"
DEALT = "IterableWrapper(range(4)).sharding_round_robin_dispatch(SHARDING_PRIORITIES.MULTIPROCESSING)"
SETS_FUNCTION = "class Holding(list):\n    def __init__(self): self.read = lambda: 1\n"
UNDER_GUARD = 'if __name__ == "__main__":\n    class Own(list): pass\n    def double(x): return 2 * x\n    '


def unpicklable(part: str, program: str, value: str = "<function <lambda> at 0>") -> Mistake:
    return Mistake(program, UNPICKLABLE.replace("{part}", part).replace("{value}", value), 46, "ignore")


def of_each_loader(arguments: str) -> dict[str, str]:
    return {
        "": f"for _ in DataLoader({arguments}): pass",
        ", async": READ.format(f"AsyncDataLoader({arguments})"),
    }


OF_START_METHODS = (
    {
        f"an unpicklable {part}{kind}": unpicklable(
            part, program, f"<function {'main.<locals>.' * (kind == ', async')}<lambda> at 0>"
        )
        for part in ("collate_fn", "worker_init_fn")
        for kind, program in of_each_loader(f"[5], {FORKSERVER}, {part}=lambda _: None").items()
    }
    | {
        f"an unpicklable dataset{kind}": unpicklable(
            "dataset.read", SETS_FUNCTION + program, "<function Holding.__init__.<locals>.<lambda> at 0>"
        )
        for kind, program in of_each_loader(f"Holding(), {FORKSERVER}").items()
    }
    | {
        f"a lambda for {part}, {method}": unpicklable(
            part,
            f"for _ in DataLoader([5], num_workers=1, {part}=lambda *_: 1, multiprocessing_context={method!r}): pass",
        )
        for part, method in (("collate_fn", "spawn"), ("decode", "forkserver"), ("on_error", "forkserver"))
    }
    | {
        f"no guard, forkserver{kind}": Mistake(program, GUARD, 30)
        for kind, program in of_each_loader(f"[5], {FORKSERVER}").items()
    }
    | {
        "no guard, spawn": Mistake(
            'for _ in DataLoader([5], num_workers=1, multiprocessing_context="spawn"): pass', GUARD
        ),
        "no guard, and a logger": Mistake(
            f"import logging\nlogging.getLogger(__name__)\nfor _ in DataLoader([5], {FORKSERVER}): pass", GUARD, 30
        ),
        "no guard, DataLoader2": Mistake(IMPORTS_2 + READ_2.format("IterableWrapper([5])"), GUARD, 40, "ignore"),
        "no guard, a dispatching process": Mistake(IMPORTS_2 + READ_2.format(DEALT), GUARD, 40, "ignore"),
        "a loader beside the guard": Mistake(
            f'if __name__ == "__main__":\n    pass\nfor _ in DataLoader([5], {FORKSERVER}): pass', IMPORT_FAILED, 30
        ),
        "a main module that cannot be imported": Mistake(
            f'1 / (__name__ == "__main__")\nfor _ in DataLoader([5], {FORKSERVER}): pass', IMPORT_FAILED, 50
        ),
        "a class under the guard": Mistake(
            f"{UNDER_GUARD}for _ in DataLoader(Own([5]), {FORKSERVER}): pass", NOT_THERE
        ),
        "a function under the guard, DataLoader2": Mistake(
            IMPORTS_2 + UNDER_GUARD + READ_2.format("IterableWrapper([5]).map(double)"), NOT_THERE, 40
        ),
        "a function under the guard, a dispatching process": Mistake(
            IMPORTS_2 + UNDER_GUARD + READ_2.format(DEALT.replace(".sh", ".map(double).sh")), NOT_THERE, 40
        ),
    }
)

ALL = OF_START_METHODS | MISTAKES | OF_OPTIONS | OF_SAMPLES | OF_WORKERS | OF_LIFETIMES | OF_SHARDS


def shown(lines: list[str]) -> int:
    """The number of lines, where a frame of a traceback counts two at most. Its further lines depend on the Python
    version: marks, and the rest of a call that takes several lines.
    """
    number, frame, below = 0, -1, 0  # the indentation of the frame's first line, the number of lines below it
    for line in lines:
        text = line.lstrip(" |")
        indent = len(line) - len(text)
        if frame >= 0 and indent > frame:
            below += 1
            number += below == 1
        else:
            number += 1
            frame, below = indent if re.match(r'File ".*", line \d+, in ', text) else -1, 0
    return number


def without_numbers(line: str) -> str:
    # Which process imports the main module, and so exits, the worker or the fork server, depends on the Python version.
    line = line.replace("exit code unknown. The fork server has ended.", "exit code 1.")
    return re.sub(r"\b(?:0x[0-9a-f]+|\d+)\b", "N", line)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALL)
def test_the_last_line_says_what_to_do(name: str, tmp_path: Path) -> None:
    """The line is as expected word for word, except for numbers; and few lines stand before it."""
    mistake = ALL[name]
    script = tmp_path / "program.py"
    script.write_text(IMPORTS + mistake.program + "\n")
    env = {**environment(), "PYTHONWARNINGS": mistake.warnings} if mistake.warnings != "error" else environment()
    ran = script_server.run([sys.executable, str(script)], cwd=tmp_path, env=env, timeout=60)
    expected = mistake.last.replace("{file}", str(script)).replace("{folder}", str(tmp_path)).replace("{fork}", FORK)
    assert_ends(ran, expected, mistake.lines)


@pytest.mark.thorough
@pytest.mark.independent  # no worker is started
@pytest.mark.parametrize("read_from", ["-c", "-"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_class_of_a_session_needs_cloudpickle(read_from: str, method: str, tmp_path: Path) -> None:
    """Without cloudpickle the program gets the error before a worker is started, with the alternatives."""
    (tmp_path / "cloudpickle.py").write_text("raise ImportError")
    program = f"{IMPORTS}{MAP}\nfor _ in DataLoader(Map(), num_workers=1, multiprocessing_context={method!r}): pass"
    command = [sys.executable, read_from, *([program] if read_from == "-c" else [])]
    env = {**environment(), "PYTHONPATH": f"{tmp_path}:{environment()['PYTHONPATH']}"}
    ran = subprocess.run(
        command, input=program, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=60
    )
    assert_ends(ran, SESSION.replace("{fork}", FORK), 32)


def assert_ends(ran: subprocess.CompletedProcess[str], last: str, most: int) -> None:
    """Check that the program has failed, with this last line, and has printed at most this number of lines."""
    assert ran.returncode == 1
    # torch appends the part of the graph that raised.
    lines = ran.stderr.partition("\nThis exception is thrown by ")[0].rstrip().split("\n")
    assert without_numbers(lines[-1]) == without_numbers(last)
    assert shown(lines) <= most, ran.stderr
    assert "await" in last or "never awaited" not in ran.stderr
