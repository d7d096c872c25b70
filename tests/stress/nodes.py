"""Misfortunes of a service, drawn from seeds: each loader must get what local workers make, each batch once.

    python -m tests.stress.nodes --seeds 2000        # 1 if anything was wrong or hung

Three nodes stand behind proxies, so that a node which is replaced keeps its address. A seed draws a dataset, one to
three loaders that read it at a time, and the faults of nodes, their processes and the network during this.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from asyncloader import DataLoader, Service
from tests.helpers.comparing import assert_same
from tests.service import definitions
from tests.service.proxy import Proxy, proxied
from tests.service.serving import NodeProcess, serving

NODES = 3
DEADLINE_S = 90.0
NAMES = ["numbers", "awaited", "stream"]
FAULTS = {
    "none": 10,
    "reset": 30,  # all connections of a node break
    "worker": 25,  # a process of a node is killed
    "kill": 7,  # a node is killed, and another node takes its place
    "drain": 7,  # a node is asked to end, and another node takes its place
    "stop": 5,  # a node stands still for the rest of the epoch
    "cut": 8,  # nothing gets through to a node, or from it, or both, for the rest of the epoch
    "gone": 8,  # a node takes no connections for a while
}


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Case:
    """The case of a seed. `strikes` are pairs: a number of batches, and the fault that strikes after them."""

    seed: int
    name: str
    length: int
    loaders: int
    options: dict[str, Any]
    strikes: tuple[tuple[int, str, int], ...]


def draw(seed: int) -> Case:
    """The case of this seed."""
    rng = random.Random(f"asyncloader nodes {seed}")
    name = rng.choice(["numbers", "numbers", "awaited", "stream"])
    batch_size = rng.choice([1, 2, 3, 5])
    length = rng.randint(20, 60) * batch_size
    options: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": rng.randrange(100),
        "num_workers": rng.randint(1, 4),
        "prefetch_factor": rng.choice([None, 1, 4]),
        "max_worker_restarts": 20,
    }
    if name != "stream":
        options["shuffle"] = rng.random() < 0.5
    kinds = rng.choices(list(FAULTS), list(FAULTS.values()), k=rng.randint(1, 3))
    strikes = tuple(sorted((rng.randrange(length // batch_size), kind, rng.randrange(NODES)) for kind in kinds))
    return Case(seed, name, length, rng.choice([1, 1, 2, 3]), options, strikes)


class Fleet:
    """The nodes and their proxies. For use in `with`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder = Path()
        self.nodes: list[NodeProcess] = []
        self.proxies: list[Proxy] = []
        self._lives: list[ExitStack] = []
        self.stopped: list[int] = []

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        for _ in range(NODES):
            life = ExitStack()
            node = self._started(life)
            self._lives.append(life)
            self.nodes.append(node)
            self.proxies.append(self._stack.enter_context(proxied(node.tcp)))
        return self

    def _started(self, life: ExitStack) -> NodeProcess:
        flags = [part for name in NAMES for part in ("--open", name)]
        return life.enter_context(serving(self._folder, NAMES, *flags, listen=["127.0.0.1:0"], workers=2))

    def __exit__(self, *exception: object) -> None:
        for life in self._lives:
            life.close()
        self._stack.close()

    @property
    def url(self) -> str:
        """All addresses."""
        return ",".join(proxy.address for proxy in self.proxies)

    def strike(self, kind: str, number: int, rng: random.Random) -> None:
        """Let something happen to a node."""
        node, proxy = self.nodes[number], self.proxies[number]
        if kind == "reset":
            proxy.reset()
        elif kind == "worker":
            for worker in node.workers()[:1]:
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
        elif kind in ("kill", "drain"):
            if kind == "kill":
                node.kill()
            elif node.process.pid in self.stopped:  # a stopped process reacts to no other signal
                self.stopped.remove(node.process.pid)
                os.kill(node.process.pid, signal.SIGCONT)
            self._lives[number].close()  # asks it to end, if it still runs
            self._lives[number] = ExitStack()
            self.nodes[number] = self._started(self._lives[number])
            proxy.aim(self.nodes[number].tcp)
        elif kind == "stop":
            self.stopped.append(node.process.pid)
            os.kill(node.process.pid, signal.SIGSTOP)
        elif kind == "cut":
            for direction in rng.choice([[proxy.to_node], [proxy.to_loader], [proxy.to_node, proxy.to_loader]]):
                direction.clear()
        elif kind == "gone":
            proxy.aim("tcp://127.0.0.1:9")  # no process listens at the discard port
            proxy.reset()

    def mend(self) -> None:
        """Let stopped processes continue."""
        while self.stopped:
            with suppress(ProcessLookupError):  # it may have been killed since
                os.kill(self.stopped.pop(), signal.SIGCONT)
        for node, proxy in zip(self.nodes, self.proxies, strict=True):
            proxy.to_node.set()
            proxy.to_loader.set()
            proxy.aim(node.tcp)


def run(case: Case, fleet: Fleet) -> int:
    """Run a case. Returns the batches that came; raises AssertionError, or a loader's error."""
    defined = getattr(definitions, case.name)(n=case.length)
    with DataLoader[Any](defined, **case.options) as local:
        expected = list(local)
    rng = random.Random(case.seed)
    strikes = list(case.strikes)
    # The last node is never stopped: without any node a loader may wait for the whole time that is configured.
    strikes = [
        (at, kind, number if kind not in ("stop", "cut", "gone") else number % (NODES - 1))
        for at, kind, number in strikes
    ]
    service = Service(fleet.url, wait=DEADLINE_S)

    def read(strike: Callable[[int], None]) -> list[Any]:
        got = []
        with DataLoader[Any](defined, **case.options, workers=service) as loader:
            for batch in loader:
                got.append(batch)
                strike(len(got))
        return got

    def first(batches: int) -> None:
        while strikes and batches > strikes[0][0]:
            _, kind, number = strikes.pop(0)
            fleet.strike(kind, number, rng)

    try:
        with ThreadPoolExecutor(case.loaders) as threads:
            readers: list[Callable[[int], None]] = [first, *[_nothing] * (case.loaders - 1)]
            for reading in [threads.submit(read, reader) for reader in readers]:
                assert_same(reading.result(), expected)
    finally:
        fleet.mend()
    return case.loaders * len(expected)


def _nothing(batches: int) -> None:
    del batches


def main(arguments: list[str]) -> int:
    """Run the seeds; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.nodes", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (%(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, batches, failed = time.monotonic(), 0, []
    struck: Counter[str] = Counter()
    with Fleet() as fleet:
        for seed in range(options.first, options.first + options.seeds):
            case = draw(seed)
            faulthandler.dump_traceback_later(DEADLINE_S, exit=True)  # a hang
            try:
                batches += run(case, fleet)
            except Exception as error:
                failed.append(seed)
                say(f"FAIL {case}\n     {type(error).__name__}: {str(error)[:500]}")
            struck.update(kind for _, kind, _ in case.strikes)
        faulthandler.cancel_dump_traceback_later()
    told = ", ".join(f"{number} {kind}" for kind, number in sorted(struck.items()))
    say(f"{options.seeds} seeds, {batches:,} batches, {len(failed)} failed, {time.monotonic() - began:.0f} s; {told}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
