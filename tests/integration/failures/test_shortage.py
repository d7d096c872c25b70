"""Too little memory, few descriptors, objects without pickle: errors with sizes, limits and options; a tiny
/dev/shm.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

from asyncloader import AsyncDataLoader, DataLoader, RingMemoryError, Tuning
from tests.helpers.comparing import assert_same
from tests.helpers.datasets import Numbers, Sized
from tests.helpers.running import BOTH, PATIENCE_S, ROOT, collect, environment, outcomes, run_script, script_file

PETABYTE = 1 << 50


@pytest.mark.parametrize("kind", BOTH)
def test_absurd_ring_bytes(kind: str) -> None:
    """A ring that can never fit is refused with the size wanted, the limit, the limit's source, and the option."""
    with pytest.raises(RingMemoryError) as caught:
        collect(kind, Numbers(10), num_workers=2, tuning=Tuning(ring_bytes=PETABYTE))
    error = caught.value
    assert isinstance(error, MemoryError)
    assert error.wanted >= PETABYTE
    assert error.limit is not None
    assert 0 < error.limit < PETABYTE
    text = str(error)
    assert f"{error.wanted:,}" in text
    assert f"{error.limit:,} bytes" in text
    assert "memory" in error.reason
    assert "ring_bytes" in text


LIMITED = """
import resource, sys
import torch
from asyncloader import AsyncDataLoader, DataLoader, RingMemoryError, Tuning
import asyncio

TUNING = Tuning(ring_bytes=RING)

class Large:
    def __len__(self):
        return 30
    def __getitem__(self, index):
        return torch.full((SIZE,), index, dtype=torch.uint8)

def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

async def run():
    async with AsyncDataLoader(Large(), num_workers=1, tuning=TUNING) as loader:
        async for batch in loader:
            pass

asyncio.run(asyncio.sleep(0))
list(DataLoader(torch.arange(4), num_workers=1))  # what is loaded late is loaded now
limit = used() + (300 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for use in (lambda: list(DataLoader(Large(), num_workers=1, tuning=TUNING)), lambda: asyncio.run(run())):
    try:
        use()
    except RingMemoryError as error:
        assert error.wanted > 300 << 20, error
        assert f"{error.wanted:,}" in str(error), error
        assert error.limit == limit, (error, limit)
        assert "RLIMIT_AS" in str(error) or "ulimit -v" in str(error), error
        assert "ring_bytes" in str(error), error
        print("refused")
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("size", "ring"), [(1000, "500 << 20"), ("60 << 20", "None")], ids=["a ring too large", "batches that grow it"]
)
def test_under_an_address_space_limit(size: Any, ring: str, tmp_path: Path) -> None:
    """Under ``ulimit -v`` a ring that cannot be mapped raises with size and limit; it neither hangs nor kills."""
    done = run_script(tmp_path, LIMITED.replace("SIZE", str(size)).replace("RING", ring))
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\nrefused\n", "")


def leave_little_address_space(worker: int) -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def test_a_worker_that_cannot_map_its_ring_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """Each batch gets memory of its own, and the log says why."""
    options: Any = {"num_workers": 1, "worker_init_fn": leave_little_address_space}
    with DataLoader[Any](Numbers(4), tuning=Tuning(ring_bytes=256 << 20), **options) as loader:
        assert_same(list(loader), list(DataLoader[Any](Numbers(4))))
    (line,) = (record.getMessage() for record in caplog.records)
    assert "worker 0 cannot use its ring" in line
    assert "ulimit -v" in line


class HasLock(Numbers):
    """Holds, two objects deep, an object that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__(4)
        self.client = Client()


class Client:
    def __init__(self) -> None:
        self.name = "c"
        self.guard = threading.Lock()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_unpicklable_dataset(kind: str, method: str) -> None:
    """torch's warning, the original error unchanged, and at the end the attribute's name; no worker is left behind."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object") as error:
            collect(kind, HasLock(), num_workers=2, multiprocessing_context=method)
    texts = [str(w.message) for w in caught]
    assert any(text.startswith("Got pickle error when attempting to start a worker Process.") for text in texts)
    *before, last = "".join(traceback.format_exception(error.value)).splitlines()
    assert "TypeError: cannot pickle '_thread.lock' object" in before  # from Python 3.14 on, pickle's notes follow
    assert last.startswith("dataset.client.guard = <unlocked _thread.lock")


SMALL_SHM = """
import os, sys
import torch
from torch.utils.data import default_collate
from asyncloader import AsyncDataLoader, DataLoader
import asyncio

class Large:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((1 << 20,), index, dtype=torch.uint8)

def collate(samples):
    return {"x": default_collate(samples), "n": len(samples)}

def check(batches):
    assert len(batches) == 10, len(batches)
    for position, batch in enumerate(batches):
        x = batch["x"] if isinstance(batch, dict) else batch
        assert x.shape == (4, 1 << 20)
        assert x[:, -1].tolist() == list(range(4 * position, 4 * position + 4))

async def run(**options):
    async with AsyncDataLoader(Large(), batch_size=4, num_workers=2, **options) as loader:
        return [batch async for batch in loader]

if __name__ == "__main__":
    stat = os.statvfs("/dev/shm")
    assert stat.f_blocks * stat.f_frsize == 8 << 20
    for options in ({}, {"collate_fn": collate}, {"collate_fn": collate, "persistent_workers": True}):
        check(list(DataLoader(Large(), batch_size=4, num_workers=2, **options)))
        check(asyncio.run(run(**options)))
    check(list(DataLoader(Large(), batch_size=4, num_workers=1, collate_fn=collate, multiprocessing_context="spawn")))
    assert os.listdir("/dev/shm") == []
    print("done")
"""


def _in_mount_namespace(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=8m tmpfs /dev/shm && {command}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=environment(),
        cwd=ROOT,
    )


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mount namespaces are Linux's")
def test_eight_megabytes_of_shared_memory(tmp_path: Path) -> None:
    """With a /dev/shm of 8 MB, batches of 4 MB are delivered, also when the user's collate calls default_collate."""
    try:
        allowed = _in_mount_namespace("true").returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("a mount namespace is not permitted here")
    done = _in_mount_namespace(f"exec {sys.executable} {script_file(tmp_path, SMALL_SHM)}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


FEW_DESCRIPTORS = """
import resource
import torch
from asyncloader import DataLoader, Tuning

class Rows:
    def __len__(self):
        return 2000
    def __getitem__(self, index):
        return torch.full((5000,), index)

resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
for options in ({}, {"tuning": Tuning(ring_bytes=1)}):
    kept = list(DataLoader(Rows(), num_workers=2, **options))
    assert [int(batch[0, -1]) for batch in kept] == list(range(2000))
print("done")
"""


@pytest.mark.thorough
def test_few_descriptors(tmp_path: Path) -> None:
    """Keeping 2000 batches works with 128 descriptors, where torch's default strategy needs a descriptor per tensor."""
    done = run_script(tmp_path, FEW_DESCRIPTORS)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert re.fullmatch(r"a batch of 40,000 bytes does not fit into a ring of ring_bytes=1 .+\n", done.stderr)


TOO_FEW_DESCRIPTORS = """
import asyncio
import resource
import torch
from asyncloader import AsyncDataLoader, DataLoader

async def run():
    async with AsyncDataLoader(torch.arange(40), **workers) as loader:
        await anext(aiter(loader))

workers = {"num_workers": 12, "multiprocessing_context": "fork"}
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for use in (lambda: list(DataLoader(torch.arange(40), **workers)), lambda: asyncio.run(run())):
    try:
        use()
    except OSError as error:
        print(error)
"""


def test_too_few_descriptors(tmp_path: Path) -> None:
    """For the workers: the error has the limit, the need, and what to do."""
    done = run_script(tmp_path, "import warnings; warnings.simplefilter('ignore')\n" + TOO_FEW_DESCRIPTORS)
    words = r"\[Errno 24\] Too many open files: .* may have 64,.* 12 workers .* 96 .*\(ulimit -n.*num_workers"
    assert [bool(re.fullmatch(words, line)) for line in done.stdout.splitlines()] == [True, True], done


def strings(samples: list[Any]) -> Any:
    return ["a different string " + str(i) for i in range(60_000)]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", BOTH)
def test_large_pickle_warns_once(kind: str) -> None:
    """Megabytes of Python objects in a batch are delivered, with one warning per iterator, which has the size."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = collect(kind, Numbers(6), num_workers=1, batch_size=2, collate_fn=strings)
    assert_same(got, [strings([])] * 3)
    texts = [str(w.message) for w in caught if "bytes of Python objects" in str(w.message)]
    assert len(texts) == 1
    assert "collate_fn" in texts[0]


class Limited(Sized):
    def __getitem__(self, index: int) -> Any:
        import resource

        if index == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, -1))  # memory segments obey it like files
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        return super().__getitem__(index)


def test_a_batch_that_does_not_fit_is_an_error_of_that_batch() -> None:
    """A worker that cannot get memory for a batch raises for that batch; the other batches are delivered."""
    for kind in BOTH:
        got = outcomes(kind, Limited([10, 10, 4 << 20, 10, 10]), num_workers=1)
        assert [int(batch[0, 0]) for batch in got if not isinstance(batch, tuple)] == [0, 1, 3, 4]
        error, text = got[2]
        assert issubclass(error, MemoryError | OSError)
        assert "4,194,304" in text
        assert "worker process 0" in text


def test_constructors_refuse_no_ring_size() -> None:
    """The constructors refuse no ring size: the options may still change before `iter` or the first `next`/`anext`."""
    DataLoader[Any](Numbers(4), num_workers=1, tuning=Tuning(ring_bytes=PETABYTE))
    AsyncDataLoader[Any](Numbers(4), num_workers=1, tuning=Tuning(ring_bytes=PETABYTE))
