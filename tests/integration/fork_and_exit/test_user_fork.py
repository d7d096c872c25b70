"""The user's program forks while a loader runs: the child may read held batches, the parent continues."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from asyncloader import DataLoader
from tests.helpers.datasets import Sized
from tests.helpers.running import run_script

N = 200


@pytest.mark.thorough
def test_many_forks_do_not_starve_the_ring() -> None:
    """Forks while batches are held retire slots; the loader continues with views, in a new ring at last."""
    loader = DataLoader[Any](Sized([5000] * N), num_workers=1)
    seen = []
    for position, batch in enumerate(loader):
        if position % 5 == 0:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        seen.append(int(batch.unique()))
        del batch
    assert seen == [i % 251 for i in range(N)]
    assert loader.stats()["data/ring_copies"] < N / 2


SCRIPTS = {
    "the child exits normally": """
        import os, sys
        import torch
        from asyncloader import DataLoader
        batches = iter(DataLoader(torch.arange(1000).repeat(500, 1).T.contiguous(), num_workers=2))
        held = [next(batches) for _ in range(3)]
        child = os.fork()
        if child == 0:
            assert [int(b[0, 0]) for b in held] == [0, 1, 2]
            sys.exit(0)  # runs every exit hook and finalizer
        assert os.waitpid(child, 0)[1] == 0
        assert [int(b[0, 0]) for b in batches] == list(range(3, 1000))
        print("done")
    """,
    "the child drops everything": """
        import gc, os, sys
        import torch
        from asyncloader import DataLoader
        loader = DataLoader(torch.arange(1000), num_workers=2, persistent_workers=True)
        batches = iter(loader)
        next(batches)
        child = os.fork()
        if child == 0:
            loader.close()
            del batches, loader
            gc.collect()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert [int(b) for b in batches] == list(range(1, 1000))
        assert len(list(loader)) == 1000
        print("done")
    """,
    "right after break": """
        import os, sys
        import psutil
        import torch
        from asyncloader import DataLoader
        loader = DataLoader(torch.arange(100), num_workers=2)
        for _ in range(2):
            for batch in loader:
                break
            child = os.fork()
            if child == 0:
                assert [int(b) for b in loader] == list(range(100))
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            for batch in loader:
                assert len(psutil.Process().children()) == 2  # the generation before has gone
                break
        loader.close()
        assert not psutil.Process().children()
        print("done")
    """,
    "async, the child exits normally": """
        import asyncio, os, sys
        import torch
        from asyncloader import AsyncDataLoader
        async def main():
            async with AsyncDataLoader(torch.arange(1000), num_workers=2) as loader:
                seen = []
                async for batch in loader:
                    seen.append(int(batch))
                    if len(seen) == 5:
                        child = os.fork()
                        if child == 0:
                            os._exit(len(seen))
                        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
            assert seen == list(range(1000))
        asyncio.run(main())
        batches = None
        async def leave():
            global batches
            batches = aiter(AsyncDataLoader(torch.arange(1000), num_workers=2, persistent_workers=True))
            await anext(batches)
            child = os.fork()
            if child == 0:
                batches = None
                import atexit
                atexit._run_exitfuncs()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert [int(b) async for b in batches] == list(range(1, 1000))
        asyncio.run(leave())
        print("done")
    """,
}


FORK = 'import multiprocessing; multiprocessing.set_start_method("fork")\n'  # not the default from Python 3.14 on


@pytest.mark.thorough
@pytest.mark.parametrize("name", SCRIPTS)
def test_fork_in_a_script(name: str, tmp_path: Path) -> None:
    """Whatever the child does and however it exits, the parent's workers continue and no process hangs."""
    done: subprocess.CompletedProcess[str] = run_script(tmp_path, FORK + dedent(SCRIPTS[name]))
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
