"""How large the package may be, by room and in all: what grows takes its lines from elsewhere, in the same change.

`tests/budget.toml` has the figures; ``python -m tests.test_budget`` prints those of today.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

from docs.house import FOLDERS, MODULES, ROOT, imports, parsed, room

BUDGET = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())
LOADED = (
    "import sys; from asyncloader import DataLoader; print(sum(name.startswith('asyncloader') for name in sys.modules))"
)


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def rooms() -> dict[str, int]:
    """Return the lines of each package of the budget, with those of its sub-packages that have no line of their own."""
    found = dict.fromkeys(BUDGET["rooms"], 0)
    for module, path in MODULES.items():
        package = module if module in FOLDERS else module.rpartition(".")[0]
        name = package.removeprefix("asyncloader.")
        while name not in found and "." in name:
            name = name.rpartition(".")[0]
        found[name if name in found else "asyncloader"] += len(lines(path))
    return found


def docstring_lines(path: Path) -> int:
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = 0
    for node in ast.walk(parsed(path)):
        body = getattr(node, "body", None)
        if isinstance(node, nodes) and ast.get_docstring(node) and isinstance(body, list):
            found += body[0].end_lineno - body[0].lineno + 1
    return found


def arrows() -> int:
    """Return how many pairs of rooms import one from the other, also for types alone, and when a function runs.

    The packages of `dataloader2` count as one room.
    """

    def outer(module: str) -> str:
        found = room(module)
        return "asyncloader.dataloader2" if found.startswith("asyncloader.dataloader2.") else found

    return len(
        {
            (outer(module), outer(name))
            for module in MODULES
            for name in imports(module, late=True, types=True) & MODULES.keys() - {"asyncloader"}
            if outer(name) != outer(module)
        }
    )


def measured() -> dict[str, float]:
    """Return today's figures."""
    each = {path: lines(path) for path in MODULES.values()}
    total = sum(map(len, each.values()))
    written = [line for found in each.values() for line in found if line.strip()]
    tests = list((ROOT / "tests").rglob("*.py"))
    loaded = subprocess.run([sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "lines": total,
        "lines_of_tests": sum(len(lines(path)) for path in tests),
        "mean_line": round(sum(map(len, written)) / len(written), 2),
        "docstrings": round(sum(map(docstring_lines, each)) / total, 3),
        "comments": round(sum(line.lstrip().startswith("#") for line in written) / total, 4),
        "bytes": sum(path.stat().st_size for path in each),
        "arrows": arrows(),
        "modules_loaded": int(loaded.stdout),
    }


def test_no_room_grows() -> None:
    """Each has the lines that it had, or fewer: its figure is lowered with it, and raised with another's fall."""
    over = {name: count for name, count in rooms().items() if count > BUDGET["rooms"][name]}
    assert not over
    assert sum(BUDGET["rooms"].values()) <= BUDGET["most"]["lines"]


def test_the_whole_does_not_grow() -> None:
    """Lines, tests, bytes, arrows between rooms, and modules that `DataLoader` loads: at most the budget's."""
    found = measured()
    assert {name: found[name] for name, most in BUDGET["most"].items() if found[name] > most} == {}


def test_lines_are_not_bought_by_longer_lines_or_lost_words() -> None:
    """The mean length of a line, and the share of docstrings and comments, stay."""
    found = measured()
    shares = BUDGET["shares"]
    assert found["mean_line"] <= shares["mean_line"]
    assert found["docstrings"] >= shares["docstrings"]
    assert found["comments"] >= shares["comments"]


if __name__ == "__main__":
    for name, value in {**rooms(), **measured()}.items():
        print(f"{name} = {value}")  # noqa: T201
