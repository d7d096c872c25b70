"""Processes that train together: a test sends requests to each, and fails if a process never answers."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import script_server
from tests.helpers.running import PATIENCE_S, ROOT, environment
from tests.processes import cpu_seconds

IDLE_S = 0.1
"""CPU time in `PATIENCE_S` below which processes wait for one another. Busy processes have more, also where 20 others
want each CPU: each worker that is not forked imports torch and its dataset's packages, for seconds of CPU time.
"""


class RankGroup:
    """Ranks 0 to ``world - 1``, each a process of `ranks_script.py` in one gloo group.

    Args:
        world: number of ranks.
        folder: for the file by which they find one another, and for their stderr.
        store: "file", or "tcp" where rank 0 serves a store by which they find one another.

    Attributes:
        held: for each rank, the resources that it holds without any loader (see `Place.left`).
    """

    def __init__(self, world: int, folder: Path, store: str = "file") -> None:
        self.world = world
        self._folder = Path(tempfile.mkdtemp(dir=folder))
        self._store = f"file://{self._folder}/store"
        if store == "tcp":
            with socket.create_server(("127.0.0.1", 0)) as free:
                # Some builds of torch have no libuv, which the store would use by default.
                self._store = f"tcp://127.0.0.1:{free.getsockname()[1]}?use_libuv=0"
        self.processes: list[subprocess.Popen[str]] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(world):
                self._start(rank)
            self.answers()
            self.held = self("left")
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs, (self._folder / f"stderr{rank}").open("wb") as errors:
            self._pipes.append(Connection(ours.detach()))
            script = [sys.executable, "-m", "tests.helpers.ranks_script", "0"]  # its standard input
            command = [*script, self._store, str(rank), str(self.world)]
            process = script_server.start(
                command, env=environment(), cwd=ROOT, stdin=theirs.fileno(), stderr=errors.fileno()
            )
            self.processes.append(process)

    def __call__(self, name: str, *values: Any, **named: Any) -> list[Any]:
        """Call a method of each rank's `Place`, on all ranks at once. Returns the results."""
        self.ask(name, *values, **named)
        return self.answers()

    def ask(self, name: str, *values: Any, **named: Any) -> None:
        """Send the call to the ranks that run, without waiting for the results."""
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            if process.poll() is None:
                pipe.send((name, values, named))

    def answers(self, *ranks: int) -> list[Any]:
        """Return the next result of these ranks, of all by default. If no rank answers, and they have not used a
        CPU meanwhile, their stacks are shown.
        """
        asked = ranks or range(self.world)
        found: dict[int, Any] = {}
        spent = self._spent()
        while len(found) < len(asked):
            pending = {self._pipes[rank]: rank for rank in asked if rank not in found}
            ready = wait(list(pending), PATIENCE_S)
            if not ready:
                before, spent = spent, self._spent()
                if spent - before < IDLE_S:
                    self._show(list(pending.values()))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = pending[pipe]
                try:
                    worked, answer = pipe.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} ended:\n{self.errors(rank)}") from None
                assert worked, f"rank {rank}: {answer}"
                found[rank] = answer
        return [found[rank] for rank in asked]

    @property
    def alive(self) -> bool:
        """Whether all ranks still run."""
        return all(process.poll() is None for process in self.processes)

    def errors(self, rank: int) -> str:
        """The rank's text on stderr."""
        return (self._folder / f"stderr{rank}").read_text()

    def _spent(self) -> float:
        return sum(cpu_seconds(process.pid) for process in self.processes)

    def _show(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGUSR1)  # it writes its stacks, and continues
        for rank in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.processes[rank].wait(1)
        texts = [f"rank {rank}:\n{self.errors(rank)}" for rank in ranks]
        self.kill()
        raise AssertionError(f"ranks {ranks} hang\n" + "\n".join(texts))

    def kill(self) -> None:
        """Kill all ranks."""
        for process in self.processes:
            process.kill()
        self._closed()

    def end(self, rank: int) -> None:
        """Let a rank end by itself, and check that it exits with code 0."""
        self._pipes[rank].close()
        assert self.processes[rank].wait(PATIENCE_S) == 0, f"rank {rank}: {self.errors(rank)}"

    def close(self) -> None:
        """Let all ranks end by themselves, and check their exit codes."""
        for pipe in self._pipes:
            pipe.close()
        try:
            for rank in range(self.world):
                self.end(rank)
        finally:
            self.kill()

    def _closed(self) -> None:
        for process in self.processes:
            process.wait()
            assert process.stdout
            process.stdout.close()
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None and self.alive:
            self.close()
        else:
            self.kill()
