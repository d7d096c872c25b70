"""The command line of `asyncloader`: its commands, and how each is run.

Data path: none. Exit codes: 0; 1 if something is to be mended; 2 if the command could not be carried out.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import sys
import warnings
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from asyncloader.errors import LoaderError
from asyncloader.version import __version__

if TYPE_CHECKING:
    from asyncloader.commands.findings import Finding

_MOST_JSON = 1 << 28  # bytes of a checkpoint in JSON


def parser() -> argparse.ArgumentParser:
    """The command line's parser."""
    from asyncloader.service.node.command import add_serve

    made = argparse.ArgumentParser("asyncloader", description="Data loading for PyTorch.")
    made.add_argument("--version", action="version", version=f"asyncloader {__version__}")
    commands = made.add_subparsers(dest="command", required=True)
    add_serve(commands)
    doctor = commands.add_parser("doctor", help="try what loaders need of this machine")
    inspect = commands.add_parser("inspect", help="count the samples of shards, and find damage")
    inspect.add_argument("urls", nargs="+", metavar="URL", help="as RemoteIterableDataset takes them")
    inspect.add_argument("--format", help="of all shards, such as tar or jsonl.gz; default: by the extension")
    inspect.add_argument("--no-read", action="store_true", help="read only listings, sizes and indexes")
    plan = commands.add_parser("plan", help="predict the rate, requests and cost of a run over shards")
    _add_plan(plan)
    checkpoint = commands.add_parser("checkpoint", help="what a saved state says")
    show = checkpoint.add_subparsers(dest="action", required=True).add_parser("show", help="in words")
    show.add_argument("file", type=Path, help="a checkpoint of torch.save, or JSON, that has loaders' states in it")
    verify = commands.add_parser(
        "verify", help="disturb a loader, compare its batches, and name what makes them differ"
    )
    verify.add_argument("--seed", type=int, default=0, help="of the drawn disturbances; default 0")
    verify.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="begin no run after these, but for four that are always made; default 60",
    )
    verify.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML, too")
    bench = commands.add_parser("bench", help="measure a loader, and search a faster setting")
    for each in (verify, bench):
        each.add_argument(
            "target", metavar="MODULE:FUNCTION", help="a function that returns a loader; or file.py:function"
        )
    bench.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="begin no run after these, but for three rounds that are always made; default 60",
    )
    bench.add_argument("--html", type=Path, metavar="FILE", help="write a report with charts, too")
    trace = commands.add_parser("trace", help="what a trace of `loader.trace()` shows, in words")
    trace.add_argument("file", type=Path, help="the .json or .json.gz file")
    top = commands.add_parser("top", help="show running loaders of this user")
    top.add_argument("socket", nargs="?", type=Path, help="a loader's socket; default: all loaders of this user")
    top.add_argument("--web", action="store_true", help="serve the page of one loader, and print its address")
    top.add_argument("--port", type=int, default=0, help="of the page; default: any that is free")
    for each in (doctor, inspect, plan, show, verify, bench, trace, top):
        each.add_argument("--json", action="store_true", help="print JSON")
    return made


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("urls", nargs="+", metavar="URL", help="as RemoteIterableDataset takes them")
    plan.add_argument("--format", help="of all shards, such as tar or jsonl.gz; default: by the extension")
    plan.add_argument("--workers", type=int, help="default: the CPUs that may be used")
    plan.add_argument("--batch-size", type=int, default=32, help="default 32")
    plan.add_argument("--prefetch-factor", type=int, default=2, help="default 2")
    plan.add_argument("--rtt", metavar="TIME", help="from a request to its first byte, such as 50ms; default: measured")
    plan.add_argument("--bandwidth", metavar="RATE", help="of all workers together, such as 1GB/s; default: unlimited")
    plan.add_argument("--decode", metavar="TIME|MODULE:FUNCTION", help="for a sample; a function is measured")
    plan.add_argument("--step", metavar="TIME", default="0s", help="a training step, of a batch; default 0s")
    plan.add_argument("--cpus", type=float, help="that the loader may use; default: all that this process may")
    plan.add_argument("--epochs", type=int, default=1, help="default 1")
    plan.add_argument("--price-requests", type=float, metavar="PRICE", help="of 1,000 requests")
    plan.add_argument("--price-gb", type=float, metavar="PRICE", help="of 10^9 bytes")
    plan.add_argument("--price-hour", type=float, metavar="PRICE", help="of an hour of the machine")
    plan.add_argument("--no-read", action="store_true", help="read only listings, sizes and indexes")


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    flags = vars(parser().parse_args(argv))
    command = flags.pop("command")
    if command == "serve":
        return _serve(flags)
    try:
        if command == "top":
            from asyncloader.commands import top

            return top.run(flags["socket"], as_json=flags["json"], web=flags["web"], port=flags["port"])
        return _report(command, flags)
    except (LoaderError, ValueError, OSError, ImportError) as error:
        from asyncloader.commands.terminal import print_error

        print_error(command, str(error))
        return 2
    except KeyboardInterrupt:  # what has been found is printed already
        return 130


def _report(command: str, flags: dict[str, Any]) -> int:
    from asyncloader.commands.findings import as_json, has_problem
    from asyncloader.commands.terminal import FindingPrinter

    if flags.get("junit"):
        _check_writable(flags["junit"])  # now, not after a minute of runs
    findings: list[Finding] = []
    began = perf_counter()
    try:
        if flags["json"]:
            findings.extend(_findings(command, flags))
            print(as_json(findings), flush=True)  # noqa: T201 - a command's own words
        else:
            with FindingPrinter(_heading(command, flags)) as printer:
                for finding in _findings(command, flags):
                    findings.append(finding)
                    printer.print(finding)
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if flags.get("junit"):
        from asyncloader.verification.junit import as_junit

        text = as_junit(flags["target"], findings, perf_counter() - began)
        flags["junit"].write_text(text, encoding="utf-8")
    return int(has_problem(findings))


def _check_writable(file: Path) -> None:
    """Check that a file can be written, without leaving an empty file. Raises OSError: it cannot."""
    new = not file.exists()
    file.open("a").close()
    if new:
        file.unlink()


def _heading(command: str, flags: dict[str, Any]) -> str:
    """The command and what it examines, in a line."""
    subject = flags.get("target") or flags.get("file") or " ".join(flags.get("urls", ()))
    return " ".join(map(str, filter(None, ("asyncloader", command, flags.get("action"), subject))))


def _findings(command: str, flags: dict[str, Any]) -> Iterable[Finding]:
    if command == "doctor":
        from asyncloader.commands.doctor import examine

        return examine()
    if command == "inspect":
        from asyncloader.bridge import run_in_thread
        from asyncloader.commands.shard_inspection import inspect

        return run_in_thread(inspect(flags["urls"], flags["format"], read=not flags["no_read"]))
    if command == "plan":
        return _plan(flags)
    if command == "verify":
        from asyncloader.verification.verify import verify

        return verify(flags["target"], seed=flags["seed"], seconds=flags["seconds"])
    if command == "bench":
        from asyncloader.benchmarking.bench import bench

        return bench(flags["target"], seconds=flags["seconds"], html=flags["html"])
    if command == "trace":
        from asyncloader.commands.trace_summary import summarize
        from asyncloader.tracing.trace_file import read

        return summarize(read(flags["file"]))
    return _show(flags["file"])


def _plan(flags: dict[str, Any]) -> Iterable[Finding]:
    from asyncloader.commands.quantities import bytes_per_second, seconds
    from asyncloader.commands.run_plan import Prices, Wanted, plan_run
    from asyncloader.cpus import usable_cpus

    wanted = Wanted(
        workers=usable_cpus() if flags["workers"] is None else flags["workers"],
        batch_size=flags["batch_size"],
        rtt_s=None if flags["rtt"] is None else seconds(flags["rtt"]),
        bandwidth=None if flags["bandwidth"] is None else bytes_per_second(flags["bandwidth"]),
        decode=flags["decode"],
        step_s=seconds(flags["step"]),
        cpus=flags["cpus"],
        epochs=flags["epochs"],
        prefetch_factor=flags["prefetch_factor"],
        prices=Prices(flags["price_requests"], flags["price_gb"], flags["price_hour"]),
    )
    return plan_run(flags["urls"], flags["format"], wanted, read=not flags["no_read"])


def _serve(flags: dict[str, Any]) -> int:
    from asyncloader.service.extra import check_extra

    try:
        check_extra()
    except ImportError as error:
        from asyncloader.commands.terminal import print_error

        print_error("serve", str(error))
        return 2
    from asyncloader.service.node import cli

    return cli.run(flags)


def _show(file: Path) -> list[Finding]:
    """Describe the loaders' states in a file.

    Raises:
        ValueError: the file is no checkpoint, or has no state.
    """
    from asyncloader.commands.state_words import describe, find_states

    found = [finding for place, state in find_states(_load(file)) for finding in describe(place, state)]
    if not found:
        raise ValueError(f"{file} has no loader's state in it: save what state_dict() returns")
    return found


def _load(file: Path) -> Any:
    with file.open("rb") as opened:
        begins = opened.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if begins in (b"{", b"["):
        if file.stat().st_size > _MOST_JSON:
            raise ValueError(f"{file} has more than {_MOST_JSON >> 20} MiB of JSON")
        try:
            return json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            why = "it nests too deep" if isinstance(error, RecursionError) else str(error)
            raise ValueError(f"{file} is not JSON that can be read: {why}") from None
    import torch

    try:
        # Mapped: the tensors beside the states are not read. Nothing but plain values is built.
        with warnings.catch_warnings(action="ignore"):  # of facts that the error has
            return torch.load(file, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(file))
    except OSError:
        raise
    except Exception as error:  # a damaged archive or pickle raises nearly anything
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file} is not a checkpoint that can be read safely: {why}") from error
