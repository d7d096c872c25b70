"""`asyncloader top`: shows loaders of this user's processes while they run.

Data path: live_server -> client -> [top] -> terminal.

A terminal gets a view that is renewed each second; a pipe gets the figures of one second, in the same lines.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncloader.base.bridge import run_in_thread
from asyncloader.commands.terminal import coloured, encode_all, has_colours, print_finding, print_json, print_line
from asyncloader.live.client import LoaderSocket, NotWatched, open_sockets, receive_all, relay
from asyncloader.live.live_server import LiveServer
from asyncloader.live.snapshot import summary
from asyncloader.verification.findings import Finding, as_lines, has_problem, in_bytes, printable

_PATIENCE_S = 5.0
_PERIOD_S = 1.5  # a snapshot comes each second
_MOST_PORT = (1 << 16) - 1
# Commands to a terminal.
_OTHER_SCREEN, _FIRST_SCREEN, _CLEAR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H\x1b[J"

T = TypeVar("T")
Snapshot = dict[str, Any]


def run(path: Path | None, *, as_json: bool, web: bool, port: int) -> int:
    """Show the loader at this socket; None: all of this user. Returns the exit code: 1 if a loader is input-bound.

    Raises:
        NotWatched: none such runs, it does not answer, or its answer cannot be read.
        ValueError: the port is out of range.
    """
    if not 0 <= port <= _MOST_PORT:
        raise ValueError(f"--port should be from 0 to {_MOST_PORT}, but got {port}")
    opened = open_sockets(path)
    try:
        if web:
            return _serve(opened, port)
        if not as_json and has_colours(sys.stdout):
            return _live(opened)
        found = _one_second(opened)
    finally:
        for connection in opened:
            connection.close()
    findings = _understood(describe, found)
    ok = not has_problem(findings)
    if as_json:
        print_json({"ok": ok, "error": None, "loaders": found})
        return int(not ok)
    encode_all(sys.stdout)
    for finding in findings:
        print_finding(finding)
    return int(not ok)


def _understood(describe: Callable[[Sequence[Snapshot]], T], found: Sequence[Snapshot]) -> T:
    """Describe snapshots, whose parts are not checked. Raises NotWatched: a part is missing, or has another form."""
    try:
        return describe(found)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise NotWatched(f"a snapshot has not the form of a loader's: {error!r:.200}") from None


def describe(found: Sequence[Snapshot]) -> list[Finding]:
    """Describe loaders, that which waits most before the others."""
    loaders = sorted(found, key=lambda each: -each["rates"]["wait_frac"])
    return [finding for each in loaders for finding in _of_loader(each)]


def _one_second(opened: Sequence[LoaderSocket]) -> list[Snapshot]:
    """The figures of a second: the first snapshot has those of the whole run."""
    for _ in range(2):
        receive_all(opened, _PATIENCE_S)
    return _newest(opened)


def _newest(opened: Sequence[LoaderSocket]) -> list[Snapshot]:
    """The newest snapshots. Raises NotWatched: none has come."""
    found = [each.latest for each in opened if each.latest is not None]
    if not found:
        names = ", ".join(str(each.path) for each in opened)
        ended = all(each.ended for each in opened)
        why = "has ended" if ended else f"no answer in {_PATIENCE_S:g} seconds; the process may be stopped"
        raise NotWatched(f"{names}: {why}")
    return found


def _of_loader(snapshot: Snapshot) -> Iterator[Finding]:
    texts, verdict = summary(snapshot), snapshot["verdict"]
    judged = texts.pop("verdict")
    yield Finding("loader", "ok", f"{snapshot['name']}, process {snapshot['pid']}, {snapshot['state']}")
    yield Finding("position", "ok", f"{snapshot['place']}")
    for name, each in texts.items():
        yield Finding(name, "note" if name in ("workers replaced", "samples skipped") else "ok", each)
    for worker in snapshot["workers"]:
        ring = "no ring"
        if worker["slots"]:
            used = f"{worker['slots_in_use']} of {worker['slots']} slots in use"
            ring = f"{used} ({in_bytes(worker['ring_bytes'])})"
        now = ", ".join((worker["place"], worker["activity"], ring))
        yield Finding(f"worker {worker['worker']}", "ok", now)
    yield Finding("verdict", "ok" if verdict["ok"] else "problem", f"{judged}")


def _serve(opened: Sequence[LoaderSocket], port: int) -> int:
    if len(opened) > 1:
        names = ", or ".join(f"asyncloader top --web {each.path}" for each in opened)
        raise NotWatched(f"{len(opened)} loaders can be watched, and the page is that of one: {names}")
    path = opened[0].path
    opened[0].close()  # without a page that is open the loader makes no snapshots
    with suppress(KeyboardInterrupt):
        run_in_thread(_serve_page(path, port))
    return 0


async def _serve_page(path: Path, port: int) -> None:
    server = LiveServer(partial(relay, path))
    try:
        await server.listen_at_port(port)
        print_line(server.url)
        await server.over.wait()
    finally:
        await server.close()


# ------------------------------------------------------------------------------------------------ in a terminal


def _live(opened: Sequence[LoaderSocket]) -> int:
    encode_all(sys.stdout)
    print_line(_OTHER_SCREEN)
    try:
        while not all(each.ended for each in opened):
            receive_all(opened, _PERIOD_S)
            shown = [each.latest for each in opened if each.latest and not each.ended]
            print_line(_CLEAR + view(_understood(describe, shown), *shutil.get_terminal_size()))
    except KeyboardInterrupt:
        return 0
    finally:
        print_line(_FIRST_SCREEN)
    # The screen is as it was before the view: its last words are to stay.
    for each in _newest(opened):
        print_line(printable(f"{each['name']}, process {each['pid']}, has ended"))
    return 0


def view(findings: Sequence[Finding], width: int, height: int) -> str:
    """Return the lines of the findings, wrapped and cut for a terminal of this size."""
    lines = ["asyncloader top; Ctrl-C ends it"]
    for finding in findings:
        first, *more = [part for line in as_lines(finding).split("\n") for part in textwrap.wrap(line, width)]
        lines += [coloured(finding, first), *more]
    return "\n".join(lines[: height - 1])
