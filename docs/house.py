"""The house: which packages and modules there are, who may import whom, and a picture of it.

    python docs/house.py     writes docs/_static/house.svg

A *room* is a package, or a module that lies beside the packages. `FLOORS` is the rule; `tests/test_architecture.py`
holds the code to it, and holds that the picture is of today's code.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from functools import cache
from html import escape
from pathlib import Path

__all__ = ["FLOOR", "FOLDERS", "MODULES", "PICTURE", "ROOT", "draw", "imports", "parsed", "room"]

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "_static" / "house.svg"

# Who may import whom: a room imports from its own line and from those above it. What a function imports late, when it
# runs, is not counted.
FLOORS = [
    "errors",
    "base",
    "workers.ipc telemetry",
    "formats transports",
    "workers.fetch ranks transports.testing",
    "samplers shared sources workers",
    "delivery packing remote",
    "remote.random_access service service.protocol",
    "service.client service.node",
    "options",
    "state",
    "epoch",
    "live",
    "loaders",
    ("dataloader2 dataloader2.datapipes dataloader2.graph dataloader2.random dataloader2.services dataloader2.utils"),
    "integrations.ray",
    "integrations asyncloader commands verification",
    "__main__",
]
FLOOR = {
    "asyncloader" if each == "asyncloader" else f"asyncloader.{each}": floor
    for floor, rooms in enumerate(FLOORS)
    for each in rooms.split()
}

_BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def _folder(package: str) -> Path:
    """Where the build takes a package from."""
    mapped: dict[str, str] = _BUILD["package-dir"]
    base = next(each for each in sorted(mapped, key=len, reverse=True) if f"{package}.".startswith(f"{each}."))
    return ROOT / mapped[base] / package.removeprefix(base).removeprefix(".").replace(".", "/")


FOLDERS: dict[str, Path] = {package: _folder(package) for package in _BUILD["packages"]}
MODULES: dict[str, Path] = {
    package if path.stem == "__init__" else f"{package}.{path.stem}": path
    for package, folder in FOLDERS.items()
    for path in sorted(folder.glob("*.py"))
}


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def room(module: str) -> str:
    """The package that a module lies in; the module itself where that is the topmost one."""
    package = module if module in FOLDERS else module.rpartition(".")[0]
    return module if package == "asyncloader" else package


@cache
def imports(module: str, *, late: bool = False, types: bool = False) -> frozenset[str]:
    """The full names that `module` imports when it is imported (`late`: also when its functions run; `types`: also
    for type checkers alone).
    """
    path = MODULES[module]
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    above = package.split(".")[: len(package.split(".")) - child.level + 1]
                    base = ".".join([*above, *filter(None, [child.module])])
                found.add(base)
                found.update({f"{base}.{alias.name}" for alias in child.names} & MODULES.keys())
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                visit(child if types else ast.Module(child.orelse, []))
            elif late or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                visit(child)

    visit(parsed(path))
    return frozenset(found)


# ----------------------------------------------------------------------------------------------------- the picture

_WIDTH, _ROW, _HEIGHT, _GAP, _MARGIN = 1080, 96, 66, 14, 12

_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" role="img"
  aria-label="The packages of asyncloader, and who imports from whom">
  <style>
    .package {{ fill: #ffffff; stroke: #0969da; stroke-width: 1.5; }}
    .files {{ fill: #f6f8fa; stroke: #8c959f; }}
    .name {{ fill: #1f2328; font-weight: 600; font-size: 13px; }}
    .says {{ fill: #57606a; font-size: 11px; }}
    .arrow {{ stroke: #8c959f; stroke-width: 1.1; fill: none; marker-end: url(#tip); opacity: 0.75; }}
  </style>
  <defs>
    <marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">
      <path d="M0 0 10 5 0 10z" fill="#8c959f"/>
    </marker>
  </defs>
  <rect width="{width}" height="{height}" fill="#ffffff"/>"""


def _boxes() -> list[list[tuple[str, list[str], list[str]]]]:
    """Per floor, from the top: each box's title, its lines, and its rooms. Single modules of a floor share a box."""
    found = []
    for rooms in reversed(FLOORS):
        names = ["asyncloader" if each == "asyncloader" else f"asyncloader.{each}" for each in rooms.split()]
        packages = [name for name in names if name in FOLDERS and name != "asyncloader"]
        floor = []
        for name in packages:
            path = FOLDERS[name].relative_to(ROOT).as_posix()
            count = sum(room(module) == name for module in MODULES)
            says = (ast.get_docstring(parsed(MODULES[name])) or "").partition("\n")[0].rstrip(".")
            floor.append((f"{path}/  ({count})", [says], [name]))
        files = [name for name in names if name not in packages]
        if files:
            texts = [f"{name.rpartition('.')[2]}.py" if name != "asyncloader" else "__init__.py" for name in files]
            floor.append(("asyncloader/", [", ".join(texts)], files))
        found.append(floor)
    return found


def _arrows(groups: list[list[str]]) -> list[tuple[int, int]]:
    """Which box imports from which, without those that follow from others."""
    number = {name: index for index, group in enumerate(groups) for name in group}
    direct: dict[int, set[int]] = {index: set() for index in range(len(groups))}
    for module in MODULES:
        for name in imports(module) & MODULES.keys() - {"asyncloader"}:
            direct[number[room(module)]].add(number[room(name)])
    below: dict[int, set[int]] = {}

    def reach(index: int) -> set[int]:
        if index not in below:
            below[index] = set()
            nexts = direct[index] - {index}
            below[index] = nexts.union(*(reach(each) for each in nexts))
        return below[index]

    return [
        (index, each)
        for index, nexts in direct.items()
        for each in sorted(nexts - {index})
        if not any(each in reach(other) for other in nexts - {index, each} if index not in reach(other))
    ]


def draw() -> str:
    """The picture as SVG: rooms by floor, each with what it is for; an arrow for who imports from whom."""
    floors = _boxes()
    height = _ROW * len(floors) + 2 * _MARGIN
    parts, middles, groups = [], [], []
    for row, floor in enumerate(floors):
        top = _MARGIN + row * _ROW
        width = min(340, (_WIDTH - 2 * _MARGIN - _GAP * (len(floor) - 1)) / len(floor))
        left = (_WIDTH - width * len(floor) - _GAP * (len(floor) - 1)) / 2
        for title, says, rooms in floor:
            kind = "files" if title == "asyncloader/" else "package"
            parts.append(
                f'  <rect class="{kind}" x="{left:.0f}" y="{top}" width="{width:.0f}" height="{_HEIGHT}" rx="6"/>'
            )
            parts.append(f'  <text class="name" x="{left + 10:.0f}" y="{top + 18}">{escape(title)}</text>')
            lines = textwrap.wrap(says[0], int(width / 6.5))[:3]
            for number, line in enumerate(lines):
                parts.append(
                    f'  <text class="says" x="{left + 10:.0f}" y="{top + 33 + 13 * number}">{escape(line)}</text>'
                )
            middles.append((left + width / 2, top))
            groups.append(rooms)
            left += width + _GAP
    arrows = []
    for upper, lower in _arrows(groups):
        (x1, y1), (x2, y2) = middles[upper], middles[lower]
        y1, bend = y1 + _HEIGHT, (y2 - y1 - _HEIGHT) / 2
        if y2 < y1:  # the same floor
            continue
        curve = f"M{x1:.0f} {y1}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2}"
        arrows.append(f'  <path class="arrow" d="{curve}"/>')
    head = _HEAD.format(width=_WIDTH, height=height)
    return "\n".join([head, *arrows, *parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(draw())
