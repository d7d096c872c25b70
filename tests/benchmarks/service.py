"""A service's rate over one connection, beside bare sockets: `python -m tests.benchmarks.service`.

One sender, one receiver, one connection over loopback, and batches that are a constant tensor: transport is what is
measured. The bare loop is `sendall` and `recv_into` over a few buffers, which does nothing else. asyncloader's figures
have a worker that writes each batch, and a node that sends it: three processes. Each figure comes from a process of its
own, the rounds are interleaved, and the bytes of each batch are checked at both ends and in the middle.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

import asyncloader
from tests.service.certificates import make_authority

from . import sections
from .harness import ROOT, JobFailed, run_program

TITLE = "## A service"
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
SIZES = {"64 KiB": 1 << 16, "1 MiB": 1 << 20, "8 MiB": 1 << 23}
TOTAL, TOTAL_QUICK = 1 << 30, 1 << 26
"""Bytes of a figure; a sixteenth of it for the smallest batches."""
AHEAD = 8
"""Batches on the way at a time, where the receiver asks for each."""
BARE, BARE_TLS = "bare sockets", "bare sockets, TLS"
LOCAL, UNIX, TCP, TLS = "asyncloader, local", "asyncloader, unix:", "asyncloader, tcp://", "asyncloader, TLS"
KINDS = (BARE, BARE_TLS, LOCAL, UNIX, TCP, TLS)
AGAINST = {TCP: BARE, TLS: BARE_TLS, UNIX: LOCAL}
"""What each is compared with."""


class Figure(NamedTuple):
    """One measurement: GB/s, and the receiving process's CPU seconds per GB."""

    rate: float
    cpu: float


class Blocks(Dataset[torch.Tensor]):
    """`n` samples, each the same bytes."""

    def __init__(self, n: int, nbytes: int) -> None:
        self.n = n
        self.sample = torch.from_numpy(content(nbytes))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


@asyncloader.definition
def blocks(n: int, nbytes: int) -> Blocks:
    """The node's dataset."""
    return Blocks(n, nbytes)


def content(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a batch."""
    return (np.arange(nbytes, dtype=np.uint64) * 2654435761 >> 7).astype(np.uint8)


def _checked(batches: Iterator[Any], nbytes: int, number: int) -> Figure:
    """Read and time the batches after the first few.

    Raises:
        JobFailed: a batch has other bytes, or one is missing.
    """
    expected, skip, came = content(nbytes), 4, 0
    places = [0, nbytes // 2, nbytes - 1]
    wanted = expected[places].tolist()
    began, began_cpu = 0.0, 0.0
    for batch in batches:
        if batch.nbytes != nbytes or np.asarray(batch)[places].tolist() != wanted:
            raise JobFailed("a batch has other bytes")
        came += 1
        if came == skip:
            began, began_cpu = time.perf_counter(), time.process_time()
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    if came != number:
        raise JobFailed(f"{came} batches came, and {number} were sent")
    gigabytes = nbytes * (number - skip) / 1e9
    return Figure(gigabytes / seconds, cpu / gigabytes)


# ---------------------------------------------------------------------------------------------- bare sockets


@contextmanager
def _forked(run: Callable[[], None]) -> Generator[None]:
    pid = os.fork()
    if pid == 0:
        try:
            run()
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.waitpid(pid, 0)


def _bare(nbytes: int, number: int, *, tls: bool) -> Figure:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        files = make_authority(Path(folder)) if tls else {}

        def send() -> None:
            context = ssl.create_default_context(cafile=files["ca"]) if tls else None
            with socket.create_connection(listener.getsockname()) as plain:
                sock: Any = context.wrap_socket(plain, server_hostname="localhost") if context else plain
                data = content(nbytes).data
                for _ in range(number):
                    sock.sendall(data)
                if tls:
                    sock.unwrap()

        with _forked(send):
            plain, _ = listener.accept()
            if tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(files["node_cert"], files["node_key"])
                plain = context.wrap_socket(plain, server_side=True)
            with closing(plain) as sock:
                return _checked(_received(sock, nbytes, number), nbytes, number)


def _received(sock: socket.socket, nbytes: int, number: int) -> Iterator[Any]:
    buffers = [np.empty(nbytes, np.uint8) for _ in range(AHEAD)]
    for turn in range(number):
        array = buffers[turn % len(buffers)]
        rest = memoryview(array.data)
        while rest:
            rest = rest[sock.recv_into(rest) :]
        yield array


# -------------------------------------------------------------------------------------------------- asyncloader


def _ours(kind: str, nbytes: int, number: int) -> Figure:
    with tempfile.TemporaryDirectory() as folder:
        files = make_authority(Path(folder))
        command = [sys.executable, "-m", "asyncloader", "serve", "tests.benchmarks.service:blocks", "--open", "blocks"]
        command += ["--workers", "1", "--listen", f"unix:{folder}/node" if kind == UNIX else "127.0.0.1:0"]
        if kind == TLS:
            command += ["--tls-cert", files["node_cert"], "--tls-key", files["node_key"]]
        if kind == LOCAL:
            return _read(None, nbytes, number)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as node:
            try:
                assert node.stdout is not None
                address = json.loads(node.stdout.readline())["listening"]
                where = asyncloader.Service(address, tls_ca=files["ca"]) if kind == TLS else address
                return _read(where, nbytes, number)
            finally:
                node.terminate()


def _read(workers: Any, nbytes: int, number: int) -> Figure:
    with asyncloader.DataLoader[Any, Any](
        blocks(n=number, nbytes=nbytes), batch_size=None, num_workers=1, prefetch_factor=AHEAD, seed=1, workers=workers
    ) as loader:
        return _checked(iter(loader), nbytes, number)


# ----------------------------------------------------------------------------------------------------- the table


def run(kind: str, nbytes: int, number: int) -> Figure:
    """Measure one, in this process.

    Raises:
        JobFailed: bytes are wrong or missing.
    """
    torch.set_num_threads(1)
    if kind in (BARE, BARE_TLS):
        return _bare(nbytes, number, tls=kind == BARE_TLS)
    return _ours(kind, nbytes, number)


def run_apart(kind: str, nbytes: int, total: int) -> Figure:
    """Measure one, in a process of its own. Errors as `run`."""
    number = max(16, (total // 16 if nbytes <= 1 << 16 else total) // nbytes)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        job = json.dumps([kind, nbytes, number])
        return Figure(*run_program("tests.benchmarks.service", job, f"{kind}, {nbytes} bytes", Path(folder)))


Results = dict[tuple[str, str], list[Figure]]


def measure(kinds: tuple[str, ...], rounds: int, total: int, log: Callable[[str], None]) -> Results:
    """Measure all of it, in rounds whose order turns around. Errors as `run`."""
    results: Results = {}
    for number in range(rounds):
        for size, nbytes in SIZES.items():
            for kind in kinds if number % 2 == 0 else reversed(kinds):
                figure = run_apart(kind, nbytes, total)
                results.setdefault((kind, size), []).append(figure)
                log(f"{size}, {kind}: {figure.rate:.2f} GB/s, {figure.cpu:.2f} s/GB")
    return results


def table(results: Results) -> str:
    """The results as a Markdown table, of medians."""
    lines = [
        "| batch | | GB/s | receiver's CPU, s/GB | of | rate | CPU |",
        "|---|---|--:|--:|---|--:|--:|",
    ]
    for size in SIZES:
        for kind in KINDS:
            if (kind, size) in results:
                rate, cpu = _medians(results[kind, size])
                line = f"| {size} | {kind} | {rate:.2f} | {cpu:.2f} |"
                other = AGAINST.get(kind, "")
                if (other, size) in results:
                    pairs = list(zip(results[kind, size], results[other, size], strict=True))
                    ratio = statistics.median(mine.rate / theirs.rate for mine, theirs in pairs)
                    share = statistics.median(mine.cpu / theirs.cpu for mine, theirs in pairs)
                    line += f" {other} | **{ratio:.2f}** | {share:.2f} |"
                else:
                    line += " | | |"
                lines.append(line)
    return "\n".join(lines)


def _medians(figures: list[Figure]) -> Figure:
    return Figure(*(statistics.median(each) for each in zip(*figures, strict=True)))


def section(results: Results, command: str, rounds: int) -> str:
    """The section of the page."""
    about = (
        f"`{command}`: one connection over loopback, batches that are a constant tensor, medians of {rounds} "
        f"interleaved rounds; ratios are medians of the rounds' ratios. {os.cpu_count()} CPUs. The bare loop has two "
        "processes that "
        "only send and receive. A service has three: a worker that writes the batch, a node that sends it, and the "
        f"loader, which receives it where the consumer reads it, and delivers it. It has {AHEAD} "
        f"batches on the way (`prefetch_factor={AHEAD}`)."
    )
    return "\n\n".join([TITLE, about, table(results)])


def main(arguments: list[str]) -> int:
    """Measure and print the table; the exit code: 2 if it failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.service", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1 short round instead of 5")
    parser.add_argument("--kinds", default=",".join(KINDS), help="those with this text, joined by `;`")
    parser.add_argument("--save", action="store_true", help=f"write the section of {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    kinds = tuple(kind for kind in KINDS if kind in options.kinds)
    if options.save and (options.quick or kinds != KINDS):
        parser.error("--save needs all rows: the section is written whole")
    rounds, total = (1, TOTAL_QUICK) if options.quick else (5, TOTAL)
    try:
        results = measure(kinds, rounds, total, lambda line: print(line, file=sys.stderr, flush=True))
    except JobFailed as failure:
        print(f"no table, because a measurement failed: {failure}", file=sys.stderr)
        return 2
    print(table(results))
    if options.save:
        text = section(results, " ".join(["python -m tests.benchmarks.service", *arguments]), rounds)
        PAGE.write_text(sections.insert(PAGE.read_text(encoding="utf-8"), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("["):  # called by `run_apart`
        Path(sys.argv[2]).write_text(json.dumps(run(*json.loads(sys.argv[1]))), encoding="utf-8")
    else:
        sys.exit(main(sys.argv[1:]))
