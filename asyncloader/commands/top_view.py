"""Draws the terminal view of `asyncloader top`, and the texts that it shares with the lines.

Data path: top -> [top_view] -> rich.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from asyncloader.commands.findings import in_bytes
from asyncloader.commands.terminal import table, text
from asyncloader.live.snapshot import summary

Snapshot = dict[str, Any]


def by_kind(found: Iterable[Snapshot]) -> tuple[list[Snapshot], list[Snapshot]]:
    """Return the snapshots of loaders, and those of nodes."""
    kinds: dict[str, list[Snapshot]] = {"loader": [], "node": []}
    for each in found:
        kinds[each["kind"]].append(each)
    return kinds["loader"], kinds["node"]


def ring_text(worker: Snapshot) -> str:
    """A worker's ring in words."""
    if not worker["slots"]:
        return "no ring"
    return f"{worker['slots_in_use']} of {worker['slots']} slots in use ({in_bytes(worker['ring_bytes'])})"


def rate_text(session: Snapshot) -> str:
    """The batches that a node sends to a loader, in words."""
    if not session["relayed"]:
        return "not counted: batches pass the node by"
    return f"{session['batches_per_s']:.3g} batches/s, {in_bytes(session['bytes_per_s'])}/s"


def quota_text(session: Snapshot) -> str:
    """The memory that a loader takes at a node, in words."""
    used, most = session["ring_bytes"] + session["unsent_bytes"], session["most_bytes"]
    return in_bytes(used) if most is None else f"{in_bytes(used)} of {in_bytes(most)}"


def session_text(session: Snapshot) -> str:
    """A loader at a node, in words."""
    tasks = f", {session['in_work']} tasks in work, {session['waiting']} waiting" if session["relayed"] else ""
    return f"{session['workers']} workers, {rate_text(session)}{tasks}; memory {quota_text(session)}"


def process_text(process: Snapshot) -> str:
    """A node's worker process, in words."""
    if not process["ready"]:
        return "making its dataset"
    connections = f"{process['connections']} worker connections"
    return f"{connections}, busy {process['busy_frac']:.0%}, {process['tasks_per_s']:.3g} tasks/s, {process['state']}"


def view(found: Sequence[Snapshot]) -> Any:
    """Return what rich draws: a table of the loaders, the details of the loader that waits most, and the nodes."""
    from rich.console import Group
    from rich.panel import Panel

    loaders, nodes = by_kind(found)
    parts = [
        *(_of_loaders(loaders) if loaders or not nodes else ()),
        *(part for each in nodes for part in _of_node(each)),
    ]
    return Group(
        *(
            Panel(part, title=text(title if place else f"{title}; Ctrl-C ends it"))
            for place, (title, part) in enumerate(parts)
        )
    )


def _of_loaders(found: Sequence[Snapshot]) -> Iterator[tuple[str, Any]]:
    columns: Sequence[str] = ("process", "loader", "batches/s", "waits", "state", "position")
    yield "asyncloader top", table(columns, (_loader_row(each) for each in found))
    if not found:
        return
    most = max(found, key=lambda each: each["rates"]["wait_frac"])
    verdict = most["verdict"]
    lines = [f"{name}: {words}" for name, words in summary(most).items() if name != "verdict"]
    title = "ok" if verdict["ok"] else f"! {verdict['bound']}"
    yield title, text("\n".join([verdict["text"], *lines]))
    columns = "worker", "place", "now", "busy", "tasks", "ring"
    yield f"workers of process {most['pid']}", table(columns, (_worker_row(each) for each in most["workers"]))
    columns = "stage", "batches" if most["unit"] == "batches" else "number", "median", "95 %", "99 %"
    yield "stages, over the whole run", table(columns, (_stage_row(each) for each in most["stages"]))


def _loader_row(each: Snapshot) -> Sequence[object]:
    rates = each["rates"]
    unit = "" if each["unit"] == "batches" else f" {each['unit']}"
    figures = f"{rates['batches_per_s']:.3g}{unit}", f"{rates['wait_frac']:.0%}"
    return each["pid"], each["name"], *figures, each["state"], each["place"]


def _worker_row(each: Snapshot) -> Sequence[object]:
    busy = f"{each['busy_frac']:.0%}"
    return each["worker"], each["place"], each["activity"], busy, each["tasks"], ring_text(each)


def _stage_row(each: Snapshot) -> Sequence[object]:
    times = (f"{each[name] * 1e3:.3g} ms" for name in ("p50_s", "p95_s", "p99_s"))
    return each["stage"], f"{each['count']:.0f}", *times


def _of_node(node: Snapshot) -> Iterator[tuple[str, Any]]:
    if node["problem"]:
        yield "! problem", text(node["problem"])
    columns: Sequence[str] = ("loader", "at", "dataset", "workers", "sends", "tasks", "memory")
    left_out = f", {node['sessions_left_out']} more loaders" if node["sessions_left_out"] else ""
    title = f"{node['name']}, process {node['pid']}, {node['state']}{left_out}"
    yield title, table(columns, (_session_row(each) for each in node["sessions"]))
    columns = "process", "dataset", "state"
    rows = ((each["pid"], each["dataset"], process_text(each)) for each in node["processes"])
    yield f"processes of {node['pid']}", table(columns, rows)


def _session_row(each: Snapshot) -> Sequence[object]:
    tasks = f"{each['in_work']} + {each['waiting']}" if each["relayed"] else "not counted"
    who = each["loader"], each["peer"], each["dataset"], each["workers"]
    return *who, rate_text(each), tasks, quota_text(each)
