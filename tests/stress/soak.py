"""Loaders that read for a long time while nodes, processes and connections fail: nothing may grow, no batch be wrong.

    python -m tests.stress.soak --minutes 30        # 1 if a batch was wrong, a loader hung, or something grew

Three nodes: of the first neither node nor processes are killed, of the second only processes, of the third all. The
others' figures are compared over the whole run; the third one proves that loaders survive.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import psutil
import torch

from asyncloader import DataLoader, Service
from tests.helpers.comparing import assert_same
from tests.helpers.running import ROOT
from tests.service import definitions
from tests.service.proxy import Proxy, proxied
from tests.service.serving import NodeProcess, serving

NAMES = ["numbers", "awaited", "stream"]
LENGTH = 400
EPOCHS = 4  # of a loader; then another loader is made
SILENT_S = 120.0  # a loader that gives no batch for this time hangs
STEP_S = 0.004  # a training step
STOP_S = 10.0  # as long as a trainer is suspended
JUDGED_S = 240.0  # memory is not judged in a shorter run: late imports and late frees make it unsteady
SLACK = {"MiB": (0.1, 24.0), "descriptors": (0.05, 6.0), "threads": (0.25, 4.0), "tasks": (0.1, 8.0), "zombies": (0, 1)}
"""The allowed difference of two medians: a part of the first, and an amount."""


class Reader(NamedTuple):
    """A loader that is made again and again."""

    name: str
    place: str
    workers: int


READERS = [
    Reader("numbers", "tcp", 3),
    Reader("awaited", "tcp", 2),
    Reader("stream", "tcp", 2),
    Reader("numbers", "tcp", 2),
    Reader("numbers", "tcp", 1),
    Reader("numbers", "unix", 2),
    Reader("stream", "unix", 2),
    Reader("numbers", "local", 2),
]


def growth(kind: str, values: Sequence[float]) -> str:
    """Whether a series of samples grows; returns the growth in words, or nothing. The first sixth is ignored.

    Both the last sixth and the sixth before it must be above the second: a single peak at the end is no growth.
    """
    sixth = len(values) // 6
    if sixth < 1:
        return ""
    second, fifth, last = (median(values[part * sixth : (part + 1) * sixth]) for part in (1, 4, 5))
    share, amount = SLACK[kind]
    allowed = second * (1 + share) + amount
    if last <= allowed or fifth <= second + (allowed - second) / 2:
        return ""
    return f"{kind}: {second:,.0f} -> {fifth:,.0f} -> {last:,.0f}"


class Soak:
    """One run.

    Args:
        seed: of the faults and their times.
        plant: a leak to be found: "fd"; "" none.
    """

    def __init__(self, seed: int, plant: str) -> None:
        self.rng = random.Random(f"asyncloader soak {seed}")
        self.plant = plant
        self.ended = threading.Event()
        self.failures: list[str] = []
        self.batches: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.heard: dict[str, float] = {}
        self.series: dict[tuple[str, str], list[float]] = {}
        self.nodes: list[NodeProcess] = []
        self.proxies: list[Proxy] = []
        self._lives: list[ExitStack] = []
        self._planted: list[int] = []
        self.right = {key(reader): expected(reader) for reader in READERS}
        self._trainer: subprocess.Popen[bytes] | None = None

    # ------------------------------------------------------------------------------------------------ nodes

    def start(self, stack: ExitStack) -> None:
        """Start nodes and their proxies."""
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(self._end_nodes)
        for number in range(3):
            life = ExitStack()
            self.nodes.append(self._started(number, life))
            self._lives.append(life)
            self.proxies.append(stack.enter_context(proxied(self.nodes[number].tcp)))

    def _end_nodes(self) -> None:
        for life in self._lives:
            life.close()

    def _started(self, number: int, life: ExitStack) -> NodeProcess:
        path = self.folder / f"{number}.sock"
        listen = ["127.0.0.1:0", f"unix:{path}"]
        return life.enter_context(serving(self.folder, NAMES, "--arg", f"n={LENGTH}", listen=listen, workers=2))

    def url(self, place: str) -> str:
        """All addresses."""
        if place == "unix":
            return ",".join(f"unix:{self.folder}/{number}.sock" for number in range(3))
        return ",".join(proxy.address for proxy in self.proxies)

    # ---------------------------------------------------------------------------------------------- loaders

    def read(self, number: int, reader: Reader) -> None:
        """Read until the end, in a thread of its own."""
        name = f"{number} {reader.name} {reader.place}"
        try:
            for batches in read(
                reader, self.right[key(reader)], None if reader.place == "local" else self.url(reader.place), self.ended
            ):
                self.batches[name] += batches
                self.heard[name] = time.monotonic()
                if self.plant == "fd":
                    self._planted.append(os.open(os.devnull, os.O_RDONLY))
        except BaseException as error:
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:600]}")
            self.ended.set()

    def trainer(self, stack: ExitStack) -> None:
        """Start a loader in a process of its own, which is suspended now and then."""
        command = [sys.executable, "-X", "faulthandler", "-W", "ignore", "-m", "tests.stress.soak"]
        output = stack.enter_context((self.folder / "trainer").open("w+"))
        process = subprocess.Popen([*command, "--trainer", self.url("tcp")], cwd=ROOT, stdout=output, stderr=output)
        self._trainer = process

        def end() -> None:
            process.terminate()  # reaches one that is stopped once it goes on
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(SILENT_S)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # prints the stacks
                process.wait()
            output.seek(0)
            said = output.read()
            if process.returncode:
                self.failures.append(f"the trainer that is suspended ended with {process.returncode}: {said[-6000:]}")
            else:
                self.batches["suspended"] = int(said.split()[-1])

        stack.callback(end)

    # ------------------------------------------------------------------------------------------------ faults

    def strike(self) -> None:
        """Let something happen."""
        kind = self.rng.choice(
            ["reset", "reset", "worker", "stop", "malformed", "malformed", "node", "still", "suspend"]
        )
        number = self.rng.randrange(3)
        node, proxy = self.nodes[number], self.proxies[number]
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if kind == "reset":
                proxy.reset()
            elif kind == "worker" and number:
                for worker in node.workers()[: self.rng.randint(1, 2)]:
                    worker.kill()
            elif kind == "still":
                for worker in node.workers()[:1]:
                    self._stop(worker.pid, 1.0)
            elif kind == "stop":
                self._stop(node.process.pid, self.rng.choice([0.5, 1.0, 4.0]))
            elif kind == "suspend" and self._trainer is not None:
                self._stop(self._trainer.pid, STOP_S)
            elif kind == "malformed":
                self._malformed(node)
            elif kind == "node" and number == 2:
                kind = self.rng.choice(["kill", "drain"])
                if kind == "kill":
                    node.kill()
                self._lives[number].close()
                self._lives[number] = ExitStack()
                self.nodes[number] = self._started(number, self._lives[number])
                proxy.aim(self.nodes[number].tcp)
            else:
                return
        self.struck[kind] += 1

    def _stop(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            self.ended.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _malformed(self, node: NodeProcess) -> None:
        """Connections that are no loader's: bytes at random, a header that promises too much, and one that is left."""
        where = urlsplit(node.tcp)
        assert where.hostname is not None
        assert where.port is not None
        header = b"ALS1" + bytes([64, 0, 0, 0]) + (1 << 30).to_bytes(4, "little") + bytes(20)
        for data in (self.rng.randbytes(80), header, header[:9], b"GET / HTTP/1.1\r\n\r\n" * 4, b""):
            with suppress(OSError), socket.create_connection((where.hostname, where.port), 2.0) as sock:
                sock.sendall(data)
                if self.rng.random() < 0.5:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset

    # ---------------------------------------------------------------------------------------------- samples

    def sample(self) -> None:
        """Record the resources of all processes."""
        gc.collect()
        tasks = sum(isinstance(each, asyncio.Task) and not each.done() for each in gc.get_objects())
        self._note("loader", "tasks", tasks)
        with suppress(psutil.Error):
            self._process("loader", [psutil.Process()])
        for number, node in enumerate(self.nodes[:2]):
            with suppress(psutil.Error):
                self._process(f"node {number}", [psutil.Process(node.process.pid)])
        with suppress(psutil.Error):
            self._process("processes", self.nodes[0].workers())
        for name, at in self.heard.items():
            if time.monotonic() - at > SILENT_S:
                self.failures.append(f"{name}: no epoch has ended for {SILENT_S:.0f} seconds")
                self.ended.set()

    def _process(self, name: str, processes: Sequence[psutil.Process]) -> None:
        self._note(name, "MiB", sum(each.memory_full_info().pss for each in processes) / (1 << 20))
        self._note(name, "descriptors", sum(each.num_fds() for each in processes))
        self._note(name, "threads", sum(each.num_threads() for each in processes))
        zombies = [child for each in processes for child in each.children() if child.status() == psutil.STATUS_ZOMBIE]
        self._note(name, "zombies", len(zombies))

    def _note(self, name: str, kind: str, value: float) -> None:
        self.series.setdefault((name, kind), []).append(value)

    def grown(self, seconds: float) -> list[str]:
        """The figures that have grown."""
        return [
            f"{name}: {text}"
            for (name, kind), values in self.series.items()
            if (kind != "MiB" or seconds >= JUDGED_S) and (text := growth(kind, values))
        ]

    def table(self) -> Iterator[str]:
        """The medians of each sixth."""
        yield f"{'':24}" + "".join(f"{f'{part + 1}/6':>10}" for part in range(6))
        for (name, kind), values in self.series.items():
            sixth = max(1, len(values) // 6)
            parts = [values[part * sixth : (part + 1) * sixth] for part in range(6)]
            yield f"{name + ' ' + kind:24}" + "".join(f"{median(part):10,.1f}" for part in parts if part)

    def close(self) -> None:
        """Close the planted leak."""
        while self._planted:
            os.close(self._planted.pop())


def key(reader: Reader) -> tuple[str, int]:
    """The options that determine its batches."""
    return reader.name, reader.workers if reader.name == "stream" else 0


def options_of(reader: Reader) -> tuple[Any, dict[str, Any]]:
    """Its dataset and options."""
    defined = getattr(definitions, reader.name)(n=LENGTH)
    options: dict[str, Any] = {"batch_size": 4, "seed": 5, "persistent_workers": True, "max_worker_restarts": 10_000}
    if reader.name != "stream":
        options["shuffle"] = True
    options["num_workers"] = reader.workers
    return defined, options


def expected(reader: Reader) -> list[list[Any]]:
    """The epochs that its loaders read."""
    defined, options = options_of(reader)
    with DataLoader[Any](defined, **options) as local:
        return [list(local) for _ in range(EPOCHS)]


def read(reader: Reader, right: list[list[Any]], url: str | None, ended: threading.Event) -> Iterator[int]:
    """Read epochs, and check each batch; gives the number of batches of each epoch."""
    defined, options = options_of(reader)
    while not ended.is_set():
        service = None if url is None else Service(url, wait=SILENT_S)
        with DataLoader[Any](defined, **options, workers=service) as loader:
            for epoch in right:
                for mine, due in zip(loader, epoch, strict=True):
                    assert_same(mine, due)
                    if ended.wait(STEP_S):
                        return
                yield len(epoch)


def train(url: str) -> int:
    """A trainer of its own: reads until SIGTERM, and prints how many batches it had."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    reader = Reader("numbers", "tcp", 2)
    batches = sum(read(reader, expected(reader), url, ended))
    sys.stdout.write(f"{batches}\n")
    return 0


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def run(seconds: float, every: float, seed: int, plant: str) -> int:
    """One run; the exit code."""
    soak = Soak(seed, plant)
    with ExitStack() as stack:
        stack.callback(soak.close)
        soak.start(stack)
        soak.trainer(stack)
        threads = [threading.Thread(target=soak.read, args=each) for each in enumerate(READERS)]
        samples = threading.Thread(target=repeat, args=(soak.sample, every, soak.ended))
        for thread in (*threads, samples):
            thread.start()
        began = time.monotonic()
        try:
            while time.monotonic() - began < seconds and not soak.ended.wait(soak.rng.uniform(0.2, 1.5)):
                soak.strike()
        finally:
            soak.ended.set()
            faulthandler.dump_traceback_later(SILENT_S, exit=True)
            for thread in (*threads, samples):
                thread.join()
            faulthandler.cancel_dump_traceback_later()
        took = time.monotonic() - began
    failures = soak.failures + [f"grown: {each}" for each in soak.grown(took)]
    for line in (*soak.table(), *(f"FAIL {each}" for each in failures)):
        say(line)
    struck = ", ".join(f"{number} {kind}" for kind, number in sorted(soak.struck.items()))
    say(f"{took:.0f} s, {sum(soak.batches.values()):,} batches of {len(soak.batches)} loaders; struck: {struck}")
    return 1 if failures else 0


def repeat(call: Callable[[], None], every: float, ended: threading.Event) -> None:
    """Call it now and then, until the end."""
    while not ended.wait(every):
        call()


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (%(default)s)")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between samples (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what strikes (%(default)s)")
    parser.add_argument("--plant", choices=["", "fd"], default="", help="a leak to be found: a descriptor per epoch")
    parser.add_argument("--trainer", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.trainer:
        return train(options.trainer)
    return run(60 * options.minutes, options.every, options.seed, options.plant)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
