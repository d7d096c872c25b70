"""Runs the simulations and measurements at scale: `python -m tests.simulation --save` writes the page."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.simulation import page, scale
from tests.simulation.epoch import Case, simulate

PUBLISHED_DAYS = 54 * 2048 / 419
"""Days until a node is lost: 419 unexpected interruptions in 54 days of 2,048 nodes (Llama 3, arXiv 2407.21783)."""
PLAIN = Case(1_000_000)
SLOW = replace(PLAIN, slow=1e-3)
CASES = {
    "nothing happens": PLAIN,
    "nodes are lost as in a published cluster": replace(PLAIN, node_days=PUBLISHED_DAYS),
    "10,000 times as often": replace(PLAIN, node_days=PUBLISHED_DAYS / 1e4),
    "the same, 10 times as many batches": replace(PLAIN, batches=10_000_000, node_days=PUBLISHED_DAYS / 1e4),
    "one task in 1,000 takes 20 times as long": SLOW,
    "the same, and no second worker gets it": replace(SLOW, hedged=False),
    "8 tasks for each worker": replace(SLOW, credits=8),
    "the same, and 1,024 batches may wait": replace(SLOW, credits=8, window=1024),
    "the same, and twice as many workers": replace(SLOW, credits=8, window=1024, workers=128, spare=2.5),
    "two tasks each, and batches in any order": replace(SLOW, in_order=False),
    "both, 10,000 times as often": replace(SLOW, node_days=PUBLISHED_DAYS / 1e4),
}
WORKERS = (8, 64, 512, 4096)
SHARDS = (200_000, 500_000, 1_000_000)
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "at-scale.md"


def main(arguments: list[str]) -> int:
    """Run all simulations. Returns the exit code: 1 if a batch was lost or delivered twice, or an order is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a hundredth of each")
    parser.add_argument("--save", action="store_true", help="write docs/reference/at-scale.md and its picture")
    options = parser.parse_args(arguments)
    if options.save and options.quick:
        parser.error("--save is for the whole")
    part = 100 if options.quick else 1
    began = time.monotonic()
    order = scale.check_order(10**12, 10_000 // part, 32)
    plans = {shards: scale.plan_shards(shards // part, 10_000 // part, 4) for shards in SHARDS}
    costs = {workers: (scale.scheduler_us(workers), scale.assignment_us(workers)) for workers in WORKERS}
    outcomes = {name: simulate(replace(case, batches=case.batches // part)) for name, case in CASES.items()}
    wrong = order.missing + sum(outcome.lost + outcome.doubled for outcome in outcomes.values())
    command = " ".join(["python -m tests.simulation", *arguments])
    text = page.written(command, time.monotonic() - began, order, plans, costs, CASES, outcomes)
    sys.stdout.write(text)
    if options.save:
        PAGE.write_text(text, encoding="utf-8")
        PAGE.with_suffix(".svg").write_text(page.drawn(outcomes), encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
