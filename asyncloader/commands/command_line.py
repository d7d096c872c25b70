"""The command line of `asyncloader`: its commands, and how each is run.

Data path: none. Exit codes: 0; 1 if something is to be mended; 2 if the command could not be carried out; 3 if `try`
found no gain; as shells have them, 130 after Ctrl-C, and 141 if the reader of standard output has closed it.
"""

from __future__ import annotations

import argparse
import stat
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncloader.base.version import __version__
from asyncloader.errors import LoaderError, text_of

if TYPE_CHECKING:
    from asyncloader.verification.findings import Finding

_INTERRUPTED, _NO_READER = 130, 141

_REMOVED = {
    "bench": "this command was removed: run your program by `asyncloader try -- python train.py`, or a loader alone by "
    "`asyncloader try MODULE:FUNCTION`",
    "plan": "this command was removed: measure a short run instead, by `asyncloader try -- python train.py`",
    "trace": "this command was removed: open the file in https://ui.perfetto.dev, or print `loader.diagnose()` and "
    "`loader.stats()`",
}


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
    checkpoint = commands.add_parser("checkpoint", help="what a saved state says")
    show = checkpoint.add_subparsers(dest="action", required=True).add_parser("show", help="in words")
    show.add_argument("file", type=Path, help="a checkpoint of torch.save, or JSON, that has loaders' states in it")
    verify = commands.add_parser(
        "verify", help="disturb a loader, compare its batches, and name the batch and field that differ"
    )
    verify.add_argument("--seed", type=int, default=0, help="of the drawn disturbances; default 0")
    verify.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="begin no run after these, but for four that are always made; default 60",
    )
    verify.add_argument(
        "target", metavar="MODULE:FUNCTION", help="a function that returns a loader; or file.py:function"
    )
    trial = commands.add_parser(
        "try",
        help="run a training program with torch's loader and with asyncloader's, and say what is gained",
        usage="asyncloader try [options] (MODULE:FUNCTION | -- PROGRAM [ARGUMENT ...])",
    )
    trial.add_argument("target", nargs="?", help="in place of a program, a function that returns a loader")
    trial.add_argument("--seconds", type=float, default=20.0, help="of each run, from its first batch on; default 20")
    trial.add_argument("--cwd", type=Path, metavar="FOLDER", help="run each time in a new copy of this folder")
    trial.add_argument("--markdown", action="store_true", help="print Markdown, for a pull request")
    top = commands.add_parser("top", help="show running loaders of this user")
    top.add_argument("socket", nargs="?", type=Path, help="a loader's socket; default: all loaders of this user")
    top.add_argument("--web", action="store_true", help="serve the page of one loader, and print its address")
    top.add_argument("--port", type=int, default=0, help="of the page; default: any that is free")
    for each in (doctor, inspect, show, verify, trial, top):
        each.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    from asyncloader.commands.terminal import CannotPrint, discard, print_error

    given = sys.argv[1:] if argv is None else argv
    if given and given[0] in _REMOVED:
        print_error(given[0], _REMOVED[given[0]])
        return 2
    program: list[str] = []
    if [*given[:1]] == ["try"] and "--" in given:
        given, program = given[: given.index("--")], [*given[given.index("--") + 1 :]]
    flags = vars(parser().parse_args(given))
    command = flags.pop("command")
    flags["program"] = program
    try:
        return _run(command, flags)
    except CannotPrint as error:
        discard(sys.stdout)
        if isinstance(error.error, BrokenPipeError):
            return _NO_READER
        print_error(command, f"standard output cannot be written: {error.error}")
        return 2


def _run(command: str, flags: dict[str, Any]) -> int:
    """Run a command. With `--json`, a document is printed however it ends.

    Raises:
        CannotPrint: standard output cannot be written.
    """
    from asyncloader.commands.terminal import CannotPrint, print_error, print_json
    from asyncloader.verification.findings import document

    findings: list[Finding] = []
    try:
        if command == "serve":
            _serve(flags)
            return 0
        if command == "try":
            from asyncloader.commands import try_command

            output = "json" if flags["json"] else "markdown" if flags["markdown"] else "text"
            return try_command.run(flags["target"], flags["program"], flags["seconds"], flags["cwd"], output)
        if command == "top":
            from asyncloader.commands import top

            return top.run(flags["socket"], as_json=flags["json"], web=flags["web"], port=flags["port"])
        return _report(command, flags, findings)
    except CannotPrint:
        raise
    except KeyboardInterrupt:  # the findings until then are printed already
        code, why = _INTERRUPTED, "it was interrupted"
    except (LoaderError, ValueError, OSError, ImportError, MemoryError) as error:
        code, why = 2, text_of(error)
        print_error(command, why)
    except Exception as error:  # of asyncloader itself, or of a module that is served: its authors need to see it
        with suppress(OSError, ValueError):  # standard error cannot be written
            traceback.print_exc()
        code, why = 2, f"{type(error).__name__}: {text_of(error)}"
        print_error(command, why)
    if flags.get("json"):
        none: dict[str, Any] = {"ok": False, "error": why, "loaders": []}
        print_json(none if command == "top" else document(findings, why))
    return code


def _report(command: str, flags: dict[str, Any], findings: list[Finding]) -> int:
    """Run a command that has findings; they are appended to the list as they are made."""
    from asyncloader.commands.terminal import encode_all, print_finding, print_json, quiet_output
    from asyncloader.verification.findings import document, has_problem

    if flags.get("file"):
        _check_regular(flags["file"])
    encode_all(sys.stdout)
    with quiet_output() if flags["json"] else nullcontext():
        for finding in _findings(command, flags):
            findings.append(finding)
            if not flags["json"]:
                print_finding(finding)
    if flags["json"]:
        print_json(document(findings))
    return int(has_problem(findings))


def _check_regular(file: Path) -> None:
    """Check that a file is regular, or a link to such: opening a pipe may wait, and reading a device never ends.

    Raises:
        OSError: it does not exist, or is a directory.
        ValueError: it is something else.
    """
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{file} is a directory: give a file in it")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{file} is no regular file: write its content to one")


def _findings(command: str, flags: dict[str, Any]) -> Iterable[Finding]:
    if command == "doctor":
        from asyncloader.commands.doctor import examine

        return examine()
    if command == "inspect":
        from asyncloader.base.bridge import run_in_thread
        from asyncloader.commands.shard_inspection import inspect

        return run_in_thread(inspect(flags["urls"], flags["format"], read=not flags["no_read"]))
    if command == "verify":
        from asyncloader.verification.verify import verify

        return verify(flags["target"], seed=flags["seed"], seconds=flags["seconds"])
    return _show(flags["file"])


def _serve(flags: dict[str, Any]) -> None:
    from asyncloader.service.protocol.definition import check_extra

    check_extra()
    from asyncloader.commands.terminal import print_line
    from asyncloader.service.node import cli

    cli.run(flags, print_line)


def _show(file: Path) -> list[Finding]:
    """Describe the loaders' states in a file.

    Raises:
        ValueError: the file is no checkpoint, or has no state.
    """
    from asyncloader.commands.checkpoint_file import read_checkpoint
    from asyncloader.commands.loader_states import describe, find_states

    found = [finding for place, state in find_states(read_checkpoint(file)) for finding in describe(place, state)]
    if not found:
        raise ValueError(f"{file} has no loader's state in it: save what state_dict() returns")
    return found
