"""Hostile peers of a service, drawn from seeds: honest up to a drawn moment, and then hostile in a drawn way.

    python -m tests.stress.peers --seeds 10000     # 1 if anything went wrong
    python -m tests.stress.peers --seed 4711       # this case alone

A hostile *loader* meets two nodes (one with TLS and a token) at which honest loaders read all the time: the nodes must
survive, every honest batch must come, exact and without a gap of 3 seconds, and the memory must stay bounded. A hostile
*node* meets an honest loader that knows an honest node, too, or no other: the loader must get its exact batches, or end
in time with an error that names the hostile node.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.stress.hostility import Case, draw
from tests.stress.peer_arena import Child, Finding, LoaderArena, NodeArena, verdict

RECENT = 12
"""Cases that may be the cause of a finding: they are played again, one by one."""
_SETTLE_S = 4.0
"""Seconds after a case that is played alone, in which its effect must show."""


class Failure(NamedTuple):
    """A case that failed, or the cases among which one failed."""

    cases: Sequence[Case]
    problems: Sequence[str]


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# ----------------------------------------------------------------------------------------------- hostile loaders


def run_loaders(cases: Sequence[Case], failed: Callable[[Failure], bool], told: Counter[str]) -> None:
    """Play loaders one after the other. `failed` is called with each failure, and says whether to go on."""
    arena = LoaderArena()
    recent: list[Case] = []
    try:
        arena.start()
        for case in cases:
            recent = [*recent[1 - RECENT :], case]
            told[arena.play(case)] += 1
            problems = arena.look()
            if problems and not failed(_culprit(arena, recent, problems)):
                return
            if problems:
                recent = []
        problems = arena.settle()
        if problems:
            failed(_culprit(arena, recent, problems))
    finally:
        arena.close()


def _culprit(arena: LoaderArena, recent: Sequence[Case], problems: Sequence[str]) -> Failure:
    """Play the newest cases again, each alone, the newest first, until one fails."""
    arena.restart()
    if len(recent) == 1:
        return Failure(recent, problems)
    for case in reversed(recent):
        arena.play(case)
        found = arena.look(_SETTLE_S if case is recent[-1] else 1.0) or arena.settle()
        if found:
            arena.restart()
            return Failure([case], found)
    return Failure(recent, [*problems, "none of them alone"])


# ------------------------------------------------------------------------------------------------- hostile nodes


def run_nodes(cases: Sequence[Case], failed: Callable[[Failure], bool], told: Counter[str]) -> None:
    """Play nodes, several at a time; one that fails is played again alone."""
    with NodeArena() as arena:
        with ThreadPoolExecutor(Child.AT_A_TIME) as threads:
            findings = list(threads.map(arena.play, cases))
        for case, finding in zip(cases, findings, strict=True):
            problems, latest = verdict(case, finding), finding
            if problems and finding.disturbed:  # perhaps by the crash of another case
                latest = arena.play(case)
                problems = verdict(case, latest)
            told[outcome_of(case, latest)] += 1
            if problems and not failed(Failure([case], problems)):
                return
        for problem in arena.problems():
            failed(Failure([], [problem]))


def outcome_of(case: Case, finding: Finding) -> str:
    """A word or two for the summary."""
    if not finding.acted:
        return f"{case.script}: never came so far"
    return f"{case.script}: {'an error' if finding.error else 'exact'}"


# ------------------------------------------------------------------------------------------------------ the command


def run(cases: Sequence[Case], most: int = 20) -> tuple[list[Failure], Counter[str]]:
    """Play cases. Returns the failures, up to a limit, and a summary."""
    failures: list[Failure] = []
    told: Counter[str] = Counter()

    def failed(failure: Failure) -> bool:
        failures.append(failure)
        for case in failure.cases:
            say(f"FAIL seed {case.seed}: {case}")
        for problem in failure.problems:
            say(f"     {problem[:1500]}")
        if len(failure.cases) == 1:
            say(f"     python -m tests.stress.peers --seed {failure.cases[0].seed} --side {failure.cases[0].side}")
        return len(failures) < most

    loaders = [case for case in cases if case.side == "loader"]
    nodes = [case for case in cases if case.side == "node"]
    if loaders:
        began = time.monotonic()
        run_loaders(loaders, failed, told)
        told["seconds of loaders"] = round(time.monotonic() - began)
    if nodes and len(failures) < most:
        began = time.monotonic()
        run_nodes(nodes, failed, told)
        told["seconds of nodes"] = round(time.monotonic() - began)
    return failures, told


def main(arguments: list[str]) -> int:
    """Run the seeds; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.peers", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (%(default)s)")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--side", choices=["loader", "node"], help="play this side for every seed")
    parser.add_argument("--act", help="only cases with this act")
    parser.add_argument("--failures", type=int, default=20, help="failures after which it stops (%(default)s)")
    options = parser.parse_args(arguments)
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    cases = [case for case in (draw(seed, options.side) for seed in seeds) if options.act in (None, case.act)]
    failures, told = run(cases, options.failures)
    said = ", ".join(f"{number} {what}" for what, number in sorted(told.items()))
    say(f"{len(cases)} draws, {len(failures)} failures; {said}")
    return 1 if failures else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # whatever a thread of a broken case still waits for
