"""Writes the page of the simulations, and draws its picture."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Mapping
from datetime import datetime
from html import escape

from tests.simulation.epoch import ANEW_S, GONE_S, NOTICED_S, Case, Outcome
from tests.simulation.scale import Order, Planning

_HEAD = """\
# At scale

Written by `{command}` in {minutes:.0f} minutes; do not edit. Python {python}, {cpus} CPUs, {date}.

No machine here has 10,000 ranks. What decides at that size is pure: the order of samples, the plan of shards, and the
scheduler, which know no sockets and no clock. So they are run as they are, on numbers of that size; only the workers,
the network and the time are simulated.

## The order

An epoch of 10^12 samples, shuffled, is read by 10,000 ranks in batches of 32. At its {windows}, {samples:,} samples
of all ranks were compared with the order of a single process: **{missing}** were missing or came twice. A rank
computes only its own indices, {us:.2f} µs each, and has the first batch from the middle of the epoch after {seek:.1f}
ms; it stores nothing.

## Planning shards

One rank of 10,000 with 4 workers plans an epoch of a remote dataset. Every rank plans for itself, so the ranks agree
without talking to one another.

| shards | seconds | memory that stays, MB | assignments of this rank |
|--:|--:|--:|--:|
{plans}

A plan is of shards' names. Where these are listed, and not given, one rank lists them for all that `torch.distributed`
connects ([more](../explanation/order-and-resume-in-streams.md#one-list-for-all-ranks)).

## The main process, for each batch

| workers | scheduler, µs a batch | shards, µs a request |
|--:|--:|--:|
{costs}

## Epochs with misfortunes

One rank reads from {nodes} nodes with {workers} workers, which make {spare} times as many batches as are taken. Two
tasks are outstanding for each worker, and {window} batches may be ready behind one that is missing, unless the row
says otherwise. Half of the lost nodes are killed, which is noticed after {kill:g} ms, and half are cut off, which is
noticed after {cut:g} s; a worker goes on elsewhere {anew:g} ms later, and the node is back after {gone:g} s. *Waited*
is the share of the time in which the consumer had no batch.

![The share of the time in which the consumer waited](at-scale.svg)

| what happens | batches | nodes lost | lost | doubled | made again | steps that waited | waited | longest wait, s |
|---|--:|--:|--:|--:|--:|--:|--:|--:|
{outcomes}

A lost node costs the tasks that its workers were at, and the time until that is noticed. Slow tasks cost more: the
order is exact, so a batch that is late holds up those behind it. So a task that the consumer waits for, and that takes
longer than nearly all others, is given to a worker at another node too, which counts as made again. More outstanding
tasks, a larger window and more workers each make the wait shorter still; only `in_order=False` ends it.
"""
# In pixels: the width of the whole, the width of the names, the heights of a row and of a bar.
_WIDTH, _LABEL, _ROW, _BAR = 860, 320, 26, 16
_STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 } rect { fill: #8a5a00 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } rect { fill: #d9a441 } }"""


def written(
    command: str,
    seconds: float,
    order: Order,
    plans: Mapping[int, Planning],
    costs: Mapping[int, tuple[float, float]],
    cases: Mapping[str, Case],
    outcomes: Mapping[str, Outcome],
) -> str:
    """Return the page's text."""
    case = next(iter(cases.values()))
    return _HEAD.format(
        command=command,
        minutes=seconds / 60,
        python=platform.python_version(),
        cpus=os.cpu_count(),
        date=f"{datetime.now():%-d %B %Y}",  # noqa: DTZ005 - the day where it ran
        windows=" and ".join([", ".join(order.windows[:-1]), order.windows[-1]]),
        samples=order.samples,
        missing=order.missing,
        us=order.us_a_sample,
        seek=order.seek_us / 1e3,
        plans="\n".join(
            f"| {shards:,} | {plan.seconds:.2f} | {plan.megabytes:.0f} | {plan.assignments} |"
            for shards, plan in plans.items()
        ),
        costs="\n".join(f"| {workers:,} | {ours:.1f} | {shards:.1f} |" for workers, (ours, shards) in costs.items()),
        nodes=case.nodes,
        workers=case.workers,
        spare=case.spare,
        window=case.window,
        kill=NOTICED_S["kill"] * 1e3,
        cut=NOTICED_S["cut"],
        anew=ANEW_S * 1e3,
        gone=GONE_S,
        outcomes="\n".join(_row(name, outcome) for name, outcome in outcomes.items()),
    )


def _row(name: str, outcome: Outcome) -> str:
    delivered, lost, doubled, again, nodes_lost, stalled, waited, longest = outcome
    return (
        f"| {name} | {delivered:,} | {nodes_lost:,} | **{lost}** | **{doubled}** | {again:,} | {stalled:.3%} | "
        f"{waited:.2%} | {longest:.1f} |"
    )


def drawn(outcomes: Mapping[str, Outcome]) -> str:
    """Return the picture: a bar for each case, as long as the share of the time that the consumer waited."""
    most = max(1e-9, *(outcome.waited for outcome in outcomes.values()))
    scale = (_WIDTH - _LABEL - 70) / most
    body = []
    for number, (name, outcome) in enumerate(outcomes.items()):
        y, length = 8 + number * _ROW, outcome.waited * scale
        body.append(f'<text x="{_LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>')
        body.append(f'<rect x="{_LABEL}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2"/>')
        body.append(f'<text x="{_LABEL + length + 6:.1f}" y="{y + 12}">{outcome.waited:.1%}</text>')
    height = 16 + len(outcomes) * _ROW
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>The share of the time in which the consumer waited</title>"
    return textwrap.dedent("\n".join([head, title, f"<style>{_STYLE}</style>", *body, "</svg>"])) + "\n"
