"""`asyncloader top`: shows loaders of this user's processes while they run.

Data path: live_server -> client -> [top].

A terminal gets a view that is renewed each second, where rich is installed; a pipe gets the figures of one second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncloader.bridge import run_in_thread
from asyncloader.commands.findings import Finding, as_lines, in_bytes
from asyncloader.live.client import LoaderSocket, NotWatched, open_sockets, receive_all, relay
from asyncloader.live.live_server import LiveServer
from asyncloader.live.snapshot import summary

_PATIENCE_S = 5.0
_PERIOD_S = 1.5  # a snapshot comes each second


def run(path: Path | None, *, as_json: bool, web: bool, port: int) -> int:
    """Show the loader at this socket; None: all loaders of this user. Returns the exit code: 1 if one is input-bound.

    Raises:
        NotWatched: no such loader runs, or it does not answer.
    """
    opened = open_sockets(path)
    try:
        if web:
            return _serve(opened, port)
        live = sys.stdout.isatty() and not as_json
        if live and find_spec("rich") is not None:
            return _live(opened)
        found = _one_second(opened)
    finally:
        for connection in opened:
            connection.close()
    ok = all(each["verdict"]["ok"] for each in found)
    if as_json:
        print(json.dumps({"ok": ok, "loaders": found}, indent=2))  # noqa: T201 - a command's own words
    else:
        for each in found:
            print("\n".join(map(as_lines, _findings(each))), flush=True)  # noqa: T201
        if live:
            print("a view that is renewed each second needs rich: pip install 'asyncloader[top]'", file=sys.stderr)  # noqa: T201
    return int(not ok)


def _one_second(opened: Sequence[LoaderSocket]) -> list[dict[str, Any]]:
    """The figures of a second: the first snapshot has those of the whole run."""
    for _ in range(2):
        receive_all(opened, _PATIENCE_S)
    found = [each.latest for each in opened if each.latest is not None]
    if not found:
        names = ", ".join(str(each.path) for each in opened)
        raise NotWatched(f"{names}: no answer in {_PATIENCE_S:g} seconds; the process may be stopped")
    return found


def _findings(snapshot: dict[str, Any]) -> Iterator[Finding]:
    texts, verdict = summary(snapshot), snapshot["verdict"]
    text = texts.pop("verdict")
    yield Finding("loader", "ok", f"{snapshot['name']}, process {snapshot['pid']}, {snapshot['state']}")
    yield Finding("position", "ok", snapshot["place"])
    for name, each in texts.items():
        yield Finding(name, "note" if name in ("workers replaced", "samples skipped") else "ok", each)
    for worker in snapshot["workers"]:
        yield Finding(
            f"worker {worker['worker']}", "ok", ", ".join((worker["place"], worker["activity"], _ring(worker)))
        )
    yield Finding("verdict", "ok" if verdict["ok"] else "problem", text)


def _ring(worker: dict[str, Any]) -> str:
    if not worker["slots"]:
        return "no ring"
    return f"{worker['slots_in_use']} of {worker['slots']} slots in use ({in_bytes(worker['ring_bytes'])})"


def _serve(opened: Sequence[LoaderSocket], port: int) -> int:
    if len(opened) > 1:
        names = "\n".join(f"  asyncloader top --web {each.path}" for each in opened)
        raise NotWatched(f"{len(opened)} loaders can be watched: name one.\n{names}")
    path = opened[0].path
    opened[0].close()  # without a page that is open the loader makes no snapshots
    with suppress(KeyboardInterrupt):
        run_in_thread(_serve_page(path, port))
    return 0


async def _serve_page(path: Path, port: int) -> None:
    server = LiveServer(lambda: relay(path))
    try:
        await server.listen_at_port(port)
        print(server.url, flush=True)  # noqa: T201 - a command's own words
        await server.broadcast.over.wait()
    finally:
        await server.close()


# ------------------------------------------------------------------------------------------------ in a terminal


def _live(opened: Sequence[LoaderSocket]) -> int:
    from rich.live import Live

    try:
        with Live(screen=True, auto_refresh=False) as live:
            while not all(each.ended for each in opened):
                receive_all(opened, _PERIOD_S)
                live.update(view([each.latest for each in opened if each.latest and not each.ended]), refresh=True)
    except KeyboardInterrupt:
        return 0
    return 0


def view(found: Sequence[dict[str, Any]]) -> Any:
    """Return what rich draws: a table of the loaders, and the details of the loader that waits most."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    loaders = Table("process", "loader", "batches/s", "waits", "state", "position", expand=True, box=None)
    for each in found:
        rates = each["rates"]
        texts = (each["pid"], each["name"], f"{rates['batches_per_s']:.3g}", f"{rates['wait_frac']:.0%}")
        loaders.add_row(*(Text(str(text)) for text in (*texts, each["state"], each["place"])))
    if not found:
        return loaders
    most = max(found, key=lambda each: each["rates"]["wait_frac"])
    workers = Table("worker", "place", "now", "busy", "tasks", "ring", expand=True, box=None)
    for each in most["workers"]:
        does = (
            each["worker"],
            each["place"],
            each["activity"],
            f"{each['busy_frac']:.0%}",
            each["tasks"],
            _ring(each),
        )
        workers.add_row(*(Text(str(text)) for text in does))
    stages = Table("stage", "batches", "median", "95 %", "99 %", expand=True, box=None)
    for each in most["stages"]:
        times = (f"{each[name] * 1e3:.3g} ms" for name in ("p50_s", "p95_s", "p99_s"))
        stages.add_row(each["stage"], f"{each['count']:.0f}", *times)
    verdict = most["verdict"]
    lines = [f"{name}: {text}" for name, text in summary(most).items() if name != "verdict"]
    return Group(
        Panel(loaders, title="asyncloader top: Ctrl-C ends it"),
        Panel(Text("\n".join([verdict["text"], *lines])), title="ok" if verdict["ok"] else f"! {verdict['bound']}"),
        Panel(workers, title=f"workers of process {most['pid']}"),
        Panel(stages, title="stages, over the whole run"),
    )
