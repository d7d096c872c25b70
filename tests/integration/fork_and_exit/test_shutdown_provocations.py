"""Programs with loaders, which exit in every possible way: torch's exit code, no hang, no process left, no output."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.provocations import CASES, DRIVER, OURS_ONLY
from tests.helpers.running import environment, without_place, without_slow_start


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The result of each case, by loader. The two drivers run side by side."""
    asked = {"torch.utils.data": {n: b for n, b in CASES.items() if n not in OURS_ONLY}, "asyncloader": CASES}
    running: dict[str, subprocess.Popen[str]] = {}
    for module, cases in asked.items():
        folder = tmp_path_factory.mktemp(module)
        path = folder / "driver.py"
        path.write_text(DRIVER.format(module=module, cases=cases))
        running[module] = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=folder,
        )
    found: dict[str, dict[str, Any]] = {}
    try:
        for module, process in running.items():
            out, err = process.communicate(timeout=110)
            assert (process.returncode, without_slow_start(err)) == (0, ""), err
            found[module] = json.loads(out)
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
    return found


def difference(got: dict[str, Any], expected: dict[str, Any]) -> str:
    """The difference between an end of the process and the expected end, as text; empty if the end is right."""
    if not got["ended"] or got["stayed"]:
        return "it hangs" if not got["ended"] else f"{got['stayed']} processes stay"
    if got["code"] != expected["code"] or got["out"] != expected["out"]:
        return f"{got} in place of {expected}"
    if not set(got["out"].split()) <= {"True"}:
        return f"it says {got['out']!r}"
    if "Traceback" not in expected["err"]:
        return f"noise: {got['err']}" if got["err"] else ""
    ends = [
        (found["err"].count("Traceback (most recent"), without_place(found["err"].rstrip("\n")).split("\n")[-1])
        for found in (got, expected)
    ]
    return "" if ends[0] == ends[1] else f"{got['err']} in place of {expected['err']}"


@pytest.mark.thorough
def test_every_provocation(ends: dict[str, dict[str, Any]]) -> None:
    """Each case, with its workers, exits with torch's exit code and output; only uncaught exceptions are printed."""
    ours, theirs = ends["asyncloader"], ends["torch.utils.data"]
    found = {}
    for name in CASES:
        quiet = {"code": 0, "out": ours[name]["out"], "err": ""}
        found[name] = difference(ours[name], theirs.get(name, quiet))
    assert {name: words for name, words in found.items() if words} == {}
    assert len(found) == len(CASES)


def test_the_cases_prove_something(ends: dict[str, dict[str, Any]]) -> None:
    """The demands can be met: torch's own loader ends in each of its cases. They cover four exit codes, and output."""
    theirs = ends["torch.utils.data"]
    assert all(found["ended"] for found in theirs.values())
    assert {found["code"] for found in theirs.values()} >= {0, 1, 7, -2}
    assert sum("print(" in CASES[name] and bool(found["out"]) for name, found in theirs.items()) > 15
