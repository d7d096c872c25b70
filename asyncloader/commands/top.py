"""`asyncloader top`: shows loaders of this user's processes, and nodes of a service, while they run.

Data path: live_server -> client -> [top] -> top_view.

A terminal gets a view that is renewed each second, where rich is installed; a pipe gets the figures of one second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TypeVar

from asyncloader.bridge import run_in_thread
from asyncloader.commands.findings import Finding, has_problem, printable
from asyncloader.commands.terminal import FindingPrinter, console_of, encode_all, print_json, print_line
from asyncloader.commands.top_view import Snapshot, by_kind, process_text, ring_text, session_text, view
from asyncloader.live.client import LoaderSocket, NotWatched, fetch_trace, open_sockets, receive_all, relay
from asyncloader.live.live_server import LiveServer
from asyncloader.live.snapshot import summary

_PATIENCE_S = 5.0
_PERIOD_S = 1.5  # a snapshot comes each second
_MOST_PORT = (1 << 16) - 1

T = TypeVar("T")


def run(path: Path | None, *, as_json: bool, web: bool, port: int) -> int:
    """Show the loader or node at this socket; None: all of this user. Returns the exit code: 1 if a loader is
    input-bound, or a node cannot serve.

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
        if not as_json and console_of(sys.stdout) is not None:
            return _live(opened)
        found = _one_second(opened)
    finally:
        for connection in opened:
            connection.close()
    loaders, nodes, findings = _understood(_describe, found)
    ok = not has_problem(findings)
    if as_json:
        print_json({"ok": ok, "error": None, "loaders": loaders, "nodes": nodes})
        return int(not ok)
    with FindingPrinter("asyncloader top") as printer:
        for finding in findings:
            printer.print(finding)
    if sys.stdout is not None and sys.stdout.isatty() and find_spec("rich") is None:
        print("a view that is renewed each second needs rich: pip install 'asyncloader[top]'", file=sys.stderr)  # noqa: T201
    return int(not ok)


def _understood(describe: Callable[[Sequence[Snapshot]], T], found: Sequence[Snapshot]) -> T:
    """Describe snapshots, whose parts nobody has checked. Raises NotWatched: a part is missing, or has another form."""
    try:
        return describe(found)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise NotWatched(f"a snapshot has not the form of a loader's or a node's: {error!r:.200}") from None


def _describe(found: Sequence[Snapshot]) -> tuple[list[Snapshot], list[Snapshot], list[Finding]]:
    loaders, nodes = by_kind(found)
    return loaders, nodes, [*chain(*map(_of_loader, loaders), *map(_of_node, nodes))]


def _one_second(opened: Sequence[LoaderSocket]) -> list[Snapshot]:
    """The figures of a second: the first snapshot has those of the whole run."""
    for _ in range(2):
        receive_all(opened, _PATIENCE_S)
    return _newest(opened)


def _newest(opened: Sequence[LoaderSocket]) -> list[Snapshot]:
    """The newest snapshots. Raises NotWatched: there is none."""
    found = [each.latest for each in opened if each.latest is not None]
    if not found:
        names = ", ".join(str(each.path) for each in opened)
        ended = all(each.ended for each in opened)
        why = "has ended" if ended else f"no answer in {_PATIENCE_S:g} seconds; the process may be stopped"
        raise NotWatched(f"{names}: {why}")
    return found


def _of_node(snapshot: Snapshot) -> Iterator[Finding]:
    yield Finding("node", "ok", f"{snapshot['name']}, process {snapshot['pid']}, {snapshot['state']}")
    for each in snapshot["sessions"]:
        yield Finding(f"loader {each['loader']}", "ok", f"{each['dataset']}, at {each['peer']}; {session_text(each)}")
    for each in snapshot["processes"]:
        yield Finding(f"process {each['pid']}", "ok", f"{each['dataset']}; {process_text(each)}")
    if snapshot["problem"]:
        yield Finding("problem", "problem", f"{snapshot['problem']}")


def _of_loader(snapshot: Snapshot) -> Iterator[Finding]:
    texts, verdict = summary(snapshot), snapshot["verdict"]
    text = texts.pop("verdict")
    yield Finding("loader", "ok", f"{snapshot['name']}, process {snapshot['pid']}, {snapshot['state']}")
    yield Finding("position", "ok", f"{snapshot['place']}")
    for name, each in texts.items():
        yield Finding(name, "note" if name in ("workers replaced", "samples skipped") else "ok", each)
    for worker in snapshot["workers"]:
        now = ", ".join((worker["place"], worker["activity"], ring_text(worker)))
        yield Finding(f"worker {worker['worker']}", "ok", now)
    yield Finding("verdict", "ok" if verdict["ok"] else "problem", f"{text}")


def _serve(opened: Sequence[LoaderSocket], port: int) -> int:
    if len(opened) > 1:
        names = ", or ".join(f"asyncloader top --web {each.path}" for each in opened)
        raise NotWatched(f"{len(opened)} loaders or nodes can be watched, and the page is that of one: {names}")
    path = opened[0].path
    opened[0].close()  # without a page that is open the loader makes no snapshots
    with suppress(KeyboardInterrupt):
        run_in_thread(_serve_page(path, port))
    return 0


async def _serve_page(path: Path, port: int) -> None:
    server = LiveServer(lambda: relay(path), partial(fetch_trace, path))
    try:
        await server.listen_at_port(port)
        print_line(server.url)
        await server.broadcast.over.wait()
    finally:
        await server.close()


# ------------------------------------------------------------------------------------------------ in a terminal


def _live(opened: Sequence[LoaderSocket]) -> int:
    from rich.live import Live

    encode_all(sys.stdout)
    try:
        with Live(screen=True, auto_refresh=False) as live:
            while not all(each.ended for each in opened):
                receive_all(opened, _PERIOD_S)
                shown = [each.latest for each in opened if each.latest and not each.ended]
                live.update(_understood(view, shown), refresh=True)
    except KeyboardInterrupt:
        return 0
    # The screen is as it was before the view: its last words are to stay.
    for line in _understood(_ended, _newest(opened)):
        print_line(printable(line))
    return 0


def _ended(found: Sequence[Snapshot]) -> list[str]:
    return [f"{each['name']}, process {each['pid']}, has ended" for each in found]
