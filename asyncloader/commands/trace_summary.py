"""`asyncloader trace`: describes the run that a trace shows. Pure.

Data path: tracing.trace_file -> [trace_summary] -> findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from asyncloader.commands.findings import Finding
from asyncloader.tracing.chrome import TraceEvents

_SHOWN = 16  # workers, and events of a kind
_STAGES = ("first_read", "fetch", "collate", "write", "snapshot", "read")
_FAULTS = {
    "worker died": "see what killed it: the reason has its exit code, and its log its last words",
    "time-out": "look at what the workers did in the time before it",
}


class _Span(NamedTuple):
    begin: float
    seconds: float
    track: int
    args: Mapping[str, Any]


def summarize(trace: TraceEvents) -> list[Finding]:
    """Describe a trace: how long the consumer waited, what each worker did, and what happened to them.

    Raises:
        ValueError: an event has not the form of those of a loader's trace.
    """
    try:
        return list(_summarize(trace))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"an event of the trace has not the form of a loader's: {error!r:.200}") from None


def _summarize(trace: TraceEvents) -> Iterator[Finding]:
    facts = trace.facts
    spans: dict[tuple[str, str], list[_Span]] = defaultdict(list)
    names: dict[int, str] = {}
    events: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in trace.events:
        if event["ph"] == "X":
            name = event["name"].partition(" ")[0]
            args = event.get("args", {})
            span = _Span(event["ts"] / 1e6, event["dur"] / 1e6, event["pid"], args)
            spans[event["cat"], name].append(span)
        elif event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "i":
            events[str(event["name"])].append({"at": event["ts"] / 1e6, "track": event["pid"], **event.get("args", {})})
    seconds = float(facts["seconds"])
    batches = spans["consumer", "batch"]
    yield _run(facts, batches, seconds)
    if batches:
        yield _waits(spans["consumer", "wait"], seconds)
    yield from _workers(spans, names, seconds)
    yield from _slowest(spans["tasks", "batch"], names)
    yield from _events(events, names)
    if not facts["complete"] or facts["left_out"]:
        left_out = ", ".join(f"{number:,} of {name}" for name, number in facts["left_out"].items())
        text = "the oldest records were overwritten" if not facts["complete"] else f"no lane was free for {left_out}"
        yield Finding("left out", "note", text, figures={"complete": facts["complete"], "left_out": facts["left_out"]})


def _run(facts: Mapping[str, Any], batches: Sequence[_Span], seconds: float) -> Finding:
    iterators = len({each.args["iterator"] for each in batches})
    text = f"{facts['loader']} (pid {facts['pid']}): {seconds:.3g} s, {_many(len(batches), 'batch')}"
    if batches:
        text += f" of {_many(iterators, 'iterator')}, {len(batches) / max(seconds, 1e-9):.3g} a second"
    figures = {"seconds": seconds, "batches": len(batches), "iterators": iterators}
    return Finding("trace", "ok" if batches else "note", text, figures=figures)


def _waits(waits: Sequence[_Span], seconds: float) -> Finding:
    times = sorted(each.seconds for each in waits) or [0.0]
    share = _union(waits) / max(seconds, 1e-9)
    half, most = times[len(times) // 2], times[-1]
    text = f"waited {share:.0%} of the time: {_ms(half)} for half of the batches at most, {_ms(most)} for the slowest"
    return Finding("consumer", "ok", text, figures={"wait_frac": share, "wait_p50_s": half, "wait_max_s": most})


def _workers(
    spans: Mapping[tuple[str, str], Sequence[_Span]], names: Mapping[int, str], seconds: float
) -> Iterator[Finding]:
    tasks: dict[int, list[_Span]] = defaultdict(list)
    for each in spans["tasks", "batch"]:
        tasks[each.track].append(each)
    stages: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for stage in _STAGES:
        for each in (*spans.get(("tasks", stage), ()), *spans.get(("reads", stage), ())):
            stages[each.track][stage].append(each.seconds)
    places = {track: names[track].partition(" (") for track in tasks}
    # "worker 2" before "worker 10"; those with one number in the order in which they began.
    for track in sorted(tasks, key=lambda track: (len(places[track][0]), places[track][0], track))[:_SHOWN]:
        mine, (name, _, place) = tasks[track], places[track]
        share = _union(mine) / max(seconds, 1e-9)
        means = {stage: sum(times) / len(times) for stage, times in stages[track].items()}
        text = f"{_many(len(mine), 'batch')}, at work {share:.0%} of the time"
        if means:
            text += "; on average " + ", ".join(f"{stage} {_ms(mean)}" for stage, mean in means.items())
        figures = {"batches": len(mine), "busy_frac": share, "mean_s": means, "place": place.removesuffix(")")}
        yield Finding(name, "ok", text, figures=figures)
    if len(tasks) > _SHOWN:
        yield Finding("more workers", "note", f"{len(tasks) - _SHOWN}")


def _slowest(tasks: Sequence[_Span], names: Mapping[int, str]) -> Iterator[Finding]:
    if len(tasks) < 2:
        return
    times = sorted(each.seconds for each in tasks)
    slow = max(tasks, key=lambda each: each.seconds)
    worker = names[slow.track].partition(" (")[0]
    text = f"batch {slow.args['batch']} of iterator {slow.args['iterator']} took {worker} {_ms(slow.seconds)}"
    text += f"; half of them take {_ms(times[len(times) // 2])} at most"
    figures = {"batch": slow.args["batch"], "iterator": slow.args["iterator"], "seconds": slow.seconds}
    yield Finding("slowest batch", "note", text, figures=figures)


def _events(events: Mapping[str, Sequence[Mapping[str, Any]]], names: Mapping[int, str]) -> Iterator[Finding]:
    for name, advice in _FAULTS.items():
        for each in events.get(name, ())[:_SHOWN]:
            reason = str(each.get("reason") or each.get("report") or "").partition("\n")[0]
            if each.get("exitcode") is not None:
                reason = f"exit code {each['exitcode']}. {reason}".strip()
            where = names.get(each["track"], "").partition(" (")[0]
            text = f"{where} after {each['at']:.3g} s" + (f": {reason}" if reason else "")
            yield Finding(name, "problem", text, advice, figures=dict(each))
    counts = Counter(
        {name: len(found) for name, found in events.items() if name not in (*_FAULTS, "lease", "lease ended")}
    )
    for name, number in sorted(counts.items()):
        yield Finding(name, "note", f"{number:,} times" if number > 1 else "once", figures={"number": number})


def _union(spans: Iterable[_Span]) -> float:
    """Seconds in which at least one of the spans lasts."""
    total = until = 0.0
    for each in sorted(spans, key=lambda each: each.begin):
        end = each.begin + each.seconds
        total += max(0.0, end - max(each.begin, until))
        until = max(until, end)
    return total


def _many(number: int, what: str) -> str:
    plural = "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{'' if number == 1 else plural}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
