"""The chaos runner's command: runs seeds, prints what failed and how to run it again; 1 if anything did."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from tests.stress import child, interrupted, interrupted_cases, plants, report
from tests.stress.runner import DEADLINE_S, Outcome, run_cases
from tests.stress.scenarios import SCENARIOS, draw

LOG_LINES = 60


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options; an error in them ends the program with 2."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first one (%(default)s)")
    parser.add_argument("--only", default="", help="these seeds instead, joined by commas")
    parser.add_argument("--jobs", type=int, default=2, help="cases that run at a time (%(default)s)")
    parser.add_argument("--scenario", choices=list(SCENARIOS), help="draw this scenario for every seed")
    parser.add_argument("--interrupted", action="store_true", help="epochs in which one thing fails, instead")
    parser.add_argument("--threads", action="store_true", help="worker threads in every case that can have them")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds for a case (%(default)s)")
    parser.add_argument("--plant", choices=list(plants.PLANTS), help="plant this bug first: the runner must find it")
    parser.add_argument("--fail-fast", action="store_true", help="end with the first failure")
    parser.add_argument("--verbose", action="store_true", help="tell every case, and the logs of those that failed")
    parser.add_argument("--save", action="store_true", help=f"write {report.PAGE.relative_to(report.ROOT)}")
    options = parser.parse_args(arguments)
    if options.save and (options.plant or options.scenario or options.threads or options.only or options.interrupted):
        parser.error("--save is for a run of all that is drawn, without bugs of our own")
    return options


def chosen(options: argparse.Namespace) -> Iterator[Any]:
    """The cases to be run."""
    seeds = map(int, options.only.split(",")) if options.only else range(options.first, options.first + options.seeds)
    if options.interrupted:
        return map(interrupted_cases.draw, seeds)
    return (draw(seed, options.scenario, threads=options.threads) for seed in seeds)


def tell(outcome: Outcome, options: argparse.Namespace) -> None:
    """Print a failure, with the command that runs it alone; every case when asked to."""
    case, failed = outcome.case, bool(outcome.problems)
    if failed or options.verbose:
        say(f"{'FAIL' if failed else 'ok  '} {outcome.seconds:5.1f} s  seed {case.seed}  {case}")
    for problem in outcome.problems:
        say(f"     {problem}")
    if failed:
        more = f" --scenario '{options.scenario}'" if options.scenario else ""
        more += " --interrupted" if options.interrupted else ""
        more += " --threads" if options.threads else ""
        more += f" --plant '{options.plant}'" if options.plant else ""
        say(f"     python -m tests.stress --only {case.seed}{more} --verbose")
        if options.verbose or outcome.hung:
            say("\n".join("     | " + line for line in outcome.log.splitlines()[-LOG_LINES:]))
    elif options.verbose:
        for line in outcome.report.get("warnings", []):
            say(f"     | {line.splitlines()[0][:200]}")


def main(arguments: list[str]) -> int:
    """Run the seeds; the exit code."""
    options = parse(arguments)
    torch.set_num_threads(1)  # no pool of threads: cases are forked from here
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    prepare = plants.PLANTS[options.plant] if options.plant else None
    run = interrupted.run_case if options.interrupted else child.run_case
    for outcome in run_cases(chosen(options), options.jobs, options.deadline, prepare, run):
        tell(outcome, options)
        outcomes.append(outcome)
        outcome.log = ""
        if len(outcomes) % 100 == 0:
            say(f"{len(outcomes)} cases, {sum(bool(each.problems) for each in outcomes)} failed")
        if options.fail_fast and outcome.problems:
            break
    seconds = time.monotonic() - begin
    say(report.summary(outcomes, seconds))
    if options.save:
        report.save(outcomes, " ".join(["python -m tests.stress", *arguments]), seconds)
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
