"""Ten faults that users make with torch's loader are named, each at the line of its loader, and their twins are not."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from asyncloader.commands.summary import find_faults
from asyncloader.commands.try_command import run_program

PROGRAM = Path(__file__).parent / "faulty_program.py"

NAMED = {
    "equal_seeds": {"equal random numbers"},
    "seeds_restart": {"random numbers restart", "workers start anew"},
    "equal_generators": {"equal random numbers"},
    "generator_restarts": {"random numbers restart", "workers start anew"},
    "stale": {"stale workers"},
    "same_order": {"same order in each epoch"},
    "workers_anew": {"workers start anew"},
    "iter_each_step": {"iter() for each step"},
    "duplicates": {"duplicates"},
    "states": {"states cost time"},
}


def faults_of(*arguments: str) -> dict[str, set[str]]:
    """Run the program; return the faults that are found, by the functions that make the loaders."""
    run = run_program(
        [sys.executable, str(PROGRAM), *arguments],
        {"install": False, "options": {}},
        seconds=60.0,
        most=60.0,
        source=None,
    )
    assert run.code == 0, run.errors
    functions = [each for each in ast.parse(PROGRAM.read_text()).body if isinstance(each, ast.FunctionDef)]
    found: dict[str, set[str]] = defaultdict(set)
    for each in find_faults(run.processes, run.workers):
        line = int(each.text.partition(":")[2].split(":")[0].split(",")[0])
        name = next(each.name for each in functions if each.lineno <= line <= (each.end_lineno or 0))
        found[name].add(each.name)
    assert len({place for each in run.processes for place in each}) == len(NAMED)
    return found


@pytest.mark.spawns
def test_faults_are_named() -> None:
    """Each of the ten, and no other, at its loader."""
    assert faults_of() == NAMED


@pytest.mark.spawns
def test_mended_programs_raise_no_alarm() -> None:
    """A generator of each worker's own, seeds of torch's, a sampler that is told the epoch, and so on."""
    assert faults_of("clean") == {}
