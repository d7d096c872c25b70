"""Findings about a loader, in words: the observation, the line that causes it, and the remedy.

Data path: results of runs and experiments -> [verdict] -> findings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from asyncloader.commands.findings import Finding
from asyncloader.verification.user_code import CodeLine, rank, short

State = Literal["ok", "note", "problem"]

_ENTROPY = {
    "os.urandom": "draws entropy from the operating system",
    "random.Random()": "seeds a generator of `random` from the operating system",
    "numpy.random.seed()": "seeds numpy's generator from the operating system",
    "torch.seed": "seeds torch's generator from the operating system",
    "uuid.uuid1": "makes a UUID of the clock",
    "os.getpid": "reads the process's id",
}
OWN_GENERATOR = "draw from asyncloader.sample_rng(), or in a blocking __getitem__ from random, numpy.random or torch"
_SEEDED = f"{OWN_GENERATOR}; outside of samples, give the generator a seed"


def place(given: Sequence[Any] | None) -> CodeLine | None:
    """Return a place from its plain values."""
    return None if not given else CodeLine(str(given[0]), int(given[1]), str(given[2]))


def at(name: str, state: State, where: CodeLine | None, text: str, advice: str, **figures: Any) -> Finding:
    """Return a finding about a line."""
    if where is not None:
        text, figures = (
            f"{where} in {where.function}: {text}",
            {**figures, "file": short(where.file), "line": where.line},
        )
    return Finding(name, state, text, advice, figures)


def difference(expected: Sequence[dict[str, Any]], got: Sequence[dict[str, Any]], offset: int = 0) -> int | None:
    """Return the number of the first batch that differs; None if none does."""
    for number, (one, other) in enumerate(zip(expected[offset:], got, strict=False), offset):
        if one["leaves"] != other["leaves"]:
            return number
    return None


def joined_difference(expected: Sequence[dict[str, Any]], ranks: Sequence[Sequence[dict[str, Any]]]) -> int | None:
    """Return the first batch whose samples are not those of the ranks' batches, joined in rank order."""
    for number, (whole, *shares) in enumerate(zip(expected, *ranks, strict=False)):
        if any(each.get("rows") is None for each in (whole, *shares)):
            return None
        joined = [row for share in shares for row in share["rows"]]
        if joined != whole["rows"] and len(joined) == len(whole["rows"]):
            return number
    return None


def part_of(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """Return which parts of a batch differ."""
    one, other = expected["leaves"], got["leaves"]
    parts = [path for path in one if one[path] != other.get(path)] or list(other.keys() - one.keys())
    return ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")


def entropy(name: str, where: CodeLine, number: int) -> Finding:
    """A line that asks for what no seed decides."""
    if name in ("os.listdir", "os.scandir"):
        text = (
            f"takes files in the order that a folder has them in ({name}), and batch {number} is another one in another"
        )
        return at("random numbers", "problem", where, text, "sort the names", source=name, batch=number)
    says = _ENTROPY.get(
        name, f"reads the clock ({name})" if name.startswith(("time.", "datetime.")) else f"asks {name}"
    )
    advice = "leave the clock out of samples" if name.startswith(("time.", "datetime.")) else _SEEDED
    text = f"{says}, so that batch {number} is another one in each run with the same seed"
    return at("random numbers", "problem", where, text, advice, source=name, batch=number)


def parts_ways(where: CodeLine | None, number: int, why: str, advice: str, state: State) -> Finding:
    """The first line that had another effect in a second run."""
    text = f"batch {number} differs between two runs with the same seed: {why}"
    if where is None:
        text += "; no line of the module shows it"
    return at("random numbers" if state == "problem" else "ambient seeds", state, where, text, advice, batch=number)


def drawn_at_import(where: CodeLine, number: int) -> Finding:
    """A line that draws from the process's generators while the module is imported."""
    text = f"draws while the module is imported, when nothing has seeded the generator: batch {number} is another in"
    advice = "give it a generator with a seed: random.Random(0), numpy.random.default_rng(0)"
    return at("random numbers", "problem", where, f"{text} each process", advice, batch=number)


def drawn_in_threads(where: CodeLine, number: int, seen: str) -> Finding:
    """A line that draws from the process's generators in worker threads."""
    text = f"draws from a generator of the process, which all threads share: with {seen} batch {number} is another,"
    advice = "draw from asyncloader.sample_rng()"
    return at("random numbers", "problem", where, f"{text} or refused", advice, batch=number)


def kept_state(path: str, lines: Sequence[Any], number: int, seen: str, part: str) -> Finding:
    """A value that is kept between samples, and changes them."""
    where = place(lines[0]) if lines else None
    text = f"changes {path}, and later samples depend on it: batch {number} ({part}) is another one with {seen}"
    advice = (
        "make a sample from its index alone: workers have copies of the object, which read other samples before; "
        f"copy an array before you change it, and {OWN_GENERATOR}"
    )
    if path.startswith(("sampler", "batch_sampler")):
        advice = "let the order follow from a seed and the epoch's number, which the loader gives to set_epoch()"
    return at("kept state", "problem", where, text, advice, path=path, batch=number)


def unexplained(number: int, seen: str, part: str, changed: Sequence[str]) -> Finding:
    """A difference without a cause that an experiment has shown."""
    text = f"batch {number} ({part}) is another one with {seen}"
    if changed:
        text += f". Values that change between batches: {', '.join(changed[:5])}"
    advice = "look for what a sample reads besides its index: the worker's number, other processes, files, threads"
    return Finding("bytes", "problem", text, advice, {"batch": number, "changed": list(changed)})


def goes_on(batches: int, seen: str) -> Finding:
    """An epoch with more batches than the undisturbed run had."""
    text = f"the epoch goes on behind its {batches} batches with {seen}"
    advice = "let the number of samples depend on the epoch alone, not on what was read before, the worker or the clock"
    return Finding("bytes", "problem", text, advice, {"batch": batches})


def unpicklable(given: Sequence[Any], *, needed: bool, method: str) -> Finding:
    """A part that spawned workers cannot get."""
    path, what, why, where = given
    there = place(where)
    text = f"{path}: {what}" + (f" at {there}" if there is not None else "")
    text += f" cannot be pickled ({why})"
    figures = {"path": path} | ({} if there is None else {"file": short(there.file), "line": there.line})
    if needed:
        return Finding(
            "pickling", "problem", f"{text}, but the loader's workers start by {method}",
            "define functions and classes at the top of a module, and open files at the first sample", figures,
        )  # fmt: skip
    return Finding(
        "pickling", "note", f"{text}: the loader needs forked workers",
        "from Python 3.14 on they are not the default", figures,
    )  # fmt: skip


def handle(given: Sequence[Any], *, forks: bool) -> Finding:
    """A handle that forked workers share."""
    path, kind, used, opened = given
    there = place(opened)
    text = f"{path} is {kind}" + (f", opened at {there}" if there is not None else "")
    where = place(used) if isinstance(used, list) else line_of_stacks(str(used)) if used else there
    why = {
        "an open file": ", which forked workers share with its position: each one's read moves that of the others",
        "a lock that another thread holds": ": a forked worker waits for ever, as that thread is not in it",
    }.get(kind, ", which forked workers share: their traffic gets mixed")
    state: State = "problem" if forks else "note"
    figures = {"path": path} | ({} if there is None else {"opened_file": short(there.file), "opened_line": there.line})
    advice = "open it at the first sample in each worker (worker_resource() does), or make the lock there"
    return at(
        "handles", state, where, f"uses it in a forked worker. {text}{why}" if used else text + why, advice, **figures
    )


def equal_seeds(given: Sequence[Any], *, seeded: bool) -> Finding:
    """A `worker_init_fn` that seeds all workers alike."""
    names, lines = given
    where = place(lines[0]) if lines else None
    text = f"worker_init_fn leaves {', '.join(names)} with the same seed in every worker"
    text += ": with seed= each sample is seeded anyway" if seeded else ", so that all workers draw the same numbers"
    advice = "seed by torch.initial_seed() % 2**32, or give the loader seed= and leave worker_init_fn out"
    return at("worker_init_fn", "note" if seeded else "problem", where, text, advice, generators=list(names))


def not_resumed(paths: Sequence[str], places: dict[str, Any], at_batch: int, number: int, error: str = "") -> Finding:
    """A state that does not bring the position back."""
    root = next((path.partition(".")[0].partition("[")[0] for path in paths if path.partition(".")[0] in places), "")
    where = place(places.get(root) or next(iter(places.values()), None))
    if error:
        text = f"the state of batch {at_batch} cannot be loaded: {error}"
    else:
        text = f"does not bring everything back: resumed after batch {at_batch}, batch {number} is another one"
        if paths:
            text += f". After the resume these differ: {', '.join(paths[:5])}"
    advice = "put all that later samples depend on into state_dict(), and take it back in load_state_dict()"
    return at("resume", "problem", where, text, advice, paths=list(paths[:20]), batch=number)


def broken(name: str, result: dict[str, Any], doing: str) -> Finding | None:
    """A run that raised, hung or died; None if it did neither."""
    error = result.get("error") or result.get("raised")
    if error:
        where = place(error["place"]) or line_of_traceback(error["text"])
        lines = error["text"].strip().splitlines()
        last = lines[-1] if lines else ""
        text = error["type"] if last in ("", error["type"]) else f"{error['type']}: {last}"
        notes = f" ({error['notes'][0]})" if error["notes"] else ""
        return at(
            name, "problem", where, f"{doing} raised {text}{notes}", "the line above raised it", error=error["type"]
        )
    during = f" while {result['note']}" if result.get("note") else ""
    if "late" in result:
        where = line_of_stacks(result["stacks"])
        if where is None:  # the loader itself, the start of processes, a busy machine
            text = f"{doing} did not end in time{during}, and no line of the module was running in the main process"
            # A disturbance may be slow. Of another run that has no result nothing was verified.
            return Finding(name, "note" if name == "disturbed run" else "problem", text, "give more --seconds")
        return at(
            name, "problem", where, f"{doing} did not end in time{during}",
            "this line was running: a lock of another process, a read without a time limit, or an endless loop",
        )  # fmt: skip
    if "died" in result:
        status = result["died"]
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
        where = line_of_stacks(result["stacks"]) or place(result.get("line"))
        return at(
            name, "problem", where, f"{doing}: the process {how}{during}",
            "code of a loader must raise, and not end its process", exitcode=status,
        )  # fmt: skip
    return None


def line_of_stacks(stacks: str) -> CodeLine | None:
    """Return the user's innermost line in stacks of `faulthandler`, of which the innermost come first."""
    for file, line, function in re.findall(r'^  File "(.+?)", line (\d+) in (\S+)', stacks, re.MULTILINE):
        if rank(file) == 2:
            return CodeLine(file, int(line), function)
    return None


def line_of_traceback(text: str) -> CodeLine | None:
    """Return the user's innermost line in a traceback's text."""
    found = re.findall(r'^ *File "(.+?)", line (\d+), in (\S+)', text, re.MULTILINE)
    users = [CodeLine(file, int(line), function) for file, line, function in found if rank(file) == 2]
    return users[-1] if users else None
