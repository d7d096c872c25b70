"""The house rules that a reader relies on: layers, purity, one file one job, and quiet imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "asyncloader": "asyncloader",
    "asyncloader/device": "asyncloader.device",
    "asyncloader/formats": "asyncloader.formats",
    "asyncloader/integrations": "asyncloader.integrations",
    "asyncloader/remote": "asyncloader.remote",
    "workers": "asyncloader.workers",
    "transports": "asyncloader.transports",
}
LINKS = {"workers", "transports"}


def _modules() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).glob("*.py")):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


MODULES = _modules()
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Pure: decisions and arithmetic only. They can be tested by examples, and read without knowing any I/O.
PURE = [
    "asyncloader.errors",
    "asyncloader.events",
    "asyncloader.batch_plan",
    "asyncloader.device",
    "asyncloader.device.static",
    "asyncloader.device.tensors",
    "asyncloader.epoch",
    "asyncloader.interleave",
    "asyncloader.permutation",
    "asyncloader.state_layout",
    "asyncloader.fault_options",
    "asyncloader.formats",
    "asyncloader.formats.base",
    "asyncloader.formats.compressed",
    "asyncloader.formats.crc32c",
    "asyncloader.formats.example",
    "asyncloader.formats.jsonl",
    "asyncloader.formats.mds",
    "asyncloader.formats.mds_encodings",
    "asyncloader.formats.mds_index",
    "asyncloader.formats.members",
    "asyncloader.formats.parquet",
    "asyncloader.formats.parquet_arrow",
    "asyncloader.formats.parquet_meta",
    "asyncloader.formats.parquet_pages",
    "asyncloader.formats.push",
    "asyncloader.formats.registry",
    "asyncloader.formats.tar",
    "asyncloader.formats.tfrecord",
    "asyncloader.formats.thrift",
    "asyncloader.remote.braces",
    "asyncloader.remote.catalogue",
    "asyncloader.remote.epoch_leases",
    "asyncloader.remote.lane_state",
    "asyncloader.remote.leases",
    "asyncloader.remote.shuffle",
    "asyncloader.places",
    "asyncloader.recovery",
    "asyncloader.scheduler",
    "asyncloader.reorder",
    "asyncloader.workers.bad_samples",
    "asyncloader.workers.cursor",
    "asyncloader.workers.error_notes",
    "asyncloader.workers.info",
    "asyncloader.workers.leaves",
    "asyncloader.workers.reductions",
    "asyncloader.workers.seeding",
    "asyncloader.workers.shared_build",
    "asyncloader.workers.shared_layout",
    "asyncloader.workers.layout",
    "asyncloader.workers.wire",
    "asyncloader.transports.cache_layout",
    "asyncloader.transports.broken",
    "asyncloader.transports.errors",
    "asyncloader.transports.http_answers",
    "asyncloader.transports.ranges",
    "asyncloader.transports.retry",
    "asyncloader.totals",
    "asyncloader.transports.wire",
]
IMPURE_IMPORTS = {"asyncio", "multiprocessing", "select", "selectors", "socket", "subprocess", "threading"}

# Who stands where: when it is imported, a module imports from its own layer or from those below it. What a
# function imports late, when it runs, is not counted.
BOTTOM = {"asyncloader.errors", "asyncloader.events", "asyncloader.totals"}
TOP = {"asyncloader.loader", "asyncloader.stateful_loader", "asyncloader.patching", "asyncloader"}


def layer(module: str) -> int:
    """0 plain types, 1 workers and transports, 2 the stages, 3 the facade and the package's face, 4 integrations."""
    if module.startswith("asyncloader.integrations"):
        return 4
    if module in BOTTOM:
        return 0
    if module.startswith(("asyncloader.workers", "asyncloader.transports")):
        return 1
    return 3 if module in TOP else 2


def imports(module: str, *, late: bool = False) -> set[str]:
    """The full names that `module` imports when it is imported (`late`: also when its functions run)."""
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
                for branch in child.orelse:
                    visit(branch)
            elif late or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                visit(child)

    visit(ast.parse(path.read_text()))
    return found


def top_level_names(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_is_below_it(module: str) -> None:
    """Plain types < workers and transports < the stages < loader.py and the package's face < integrations."""
    ours = {name for name in imports(module) if name in MODULES and name != "asyncloader"}
    too_high = sorted(name for name in ours if layer(name) > layer(module))
    assert not too_high, f"{module} (layer {layer(module)}) imports {too_high}"


@pytest.mark.parametrize("module", MODULES)
def test_workers_and_transports_do_not_know_each_other(module: str) -> None:
    """What moves batches between processes and what reads remote bytes are two subjects."""
    pair = ("asyncloader.workers", "asyncloader.transports")
    for mine, other in (pair, pair[::-1]):
        if module.startswith(mine):
            assert not [name for name in imports(module, late=True) if name.startswith(other)]


@pytest.mark.parametrize("module", [module for module in PURE if module in MODULES])
def test_pure_module_does_no_io(module: str) -> None:
    """The modules that decide import nothing that can wait, send or start something, early or late."""
    assert not top_level_names(imports(module, late=True)) & IMPURE_IMPORTS


@pytest.mark.parametrize("module", [module for module in PURE if module in MODULES])
def test_pure_module_stands_on_pure_modules(module: str) -> None:
    """A pure module's imports among ours are pure too, or the rule above says little."""
    ours = {name for name in imports(module, late=True) if name in MODULES}
    assert ours <= {*PURE, "asyncloader", "asyncloader.workers", "asyncloader.transports"}


@pytest.mark.parametrize("module", MODULES)
def test_only_the_bridge_starts_a_loop(module: str) -> None:
    """One place where sync meets async in the main process, and one where a worker starts its own loop."""
    nodes = ast.walk(ast.parse(MODULES[module].read_text()))
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    starts = calls & {"asyncio.run", "asyncio.Runner", "asyncio.new_event_loop", "uvloop.run"}
    assert not starts or module in {"asyncloader.bridge", "asyncloader.workers.worker", "asyncloader.testing"}


@pytest.mark.parametrize("module", MODULES)
def test_no_deprecated_loop_calls(module: str) -> None:
    """The running loop is the user's: no policies, and no loop taken from thin air."""
    source = MODULES[module].read_text()
    assert not re.findall(r"asyncio\.(?:get_event_loop\b|\w*_event_loop_policy)", source)


@pytest.mark.parametrize("module", MODULES)
def test_third_party_imports_are_declared(module: str) -> None:
    """What a module needs at import is a runtime dependency; what it needs late may be an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=!;\[ ]", line, maxsplit=1)[0].lower() for line in requirements}

    runtime = names(project["dependencies"])
    extras = set().union(*(names(lines) for lines in project["optional-dependencies"].values()))
    known = {"asyncloader", *sys.stdlib_module_names}
    # A bridge to a framework is imported by those who have the framework.
    early = runtime | extras if module.startswith("asyncloader.integrations.") else runtime
    assert top_level_names(imports(module)) - known <= early
    assert top_level_names(imports(module, late=True)) - known <= runtime | extras


@pytest.mark.parametrize("module", MODULES)
def test_module_says_what_it_is(module: str) -> None:
    """Every module opens with a docstring, and its first line is a whole sentence or a title."""
    docstring = ast.get_docstring(ast.parse(MODULES[module].read_text()))
    assert docstring
    assert len(docstring.splitlines()[0]) > 20


@pytest.mark.parametrize("path", [*MODULES.values(), *TESTS], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_file_is_short(path: Path) -> None:
    """One file, one job: at most 500 lines."""
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("path", TESTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tests_state_the_fact_tested(path: Path) -> None:
    """Every test has a docstring; read alone, they say what the package promises."""
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    tests = [node for node in functions if node.name.startswith("test_")]
    assert not [node.name for node in tests if not ast.get_docstring(node)]


def test_packages_are_listed() -> None:
    """The build lists its packages one by one, so a new sub-folder would be left out."""
    nested = {
        folder.relative_to(ROOT).as_posix()
        for top in FOLDERS
        for folder in (ROOT / top).iterdir()
        if folder.is_dir() and not folder.is_symlink() and folder.name != "__pycache__"
    }
    assert nested <= FOLDERS.keys()


def test_no_bare_import_of_the_checkout_folders() -> None:
    """A bare `import workers` in the checkout makes second copies of modules, whose classes equal none."""
    for path in [*MODULES.values(), *TESTS, *(ROOT / "docs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not top_level_names(set(names)) & LINKS, path


def in_fresh_interpreter(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


def test_import_has_no_side_effects() -> None:
    """Importing starts no thread or process, opens no descriptor, and changes no state of the program."""
    in_fresh_interpreter(
        """
        import asyncio, gc, logging, multiprocessing, os, random, signal, sys, threading, warnings
        import numpy, torch, torch.utils.data
        import aiofiles
        if sys.platform != "win32":
            import uvloop

        def state():
            gc.collect()
            return {
                "threads": set(threading.enumerate()),
                "children": multiprocessing.active_children(),
                "descriptors": set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set(),
                "start method": multiprocessing.get_start_method(allow_none=True),
                "signals": {n: signal.getsignal(n) for n in signal.valid_signals() if n not in (9, 19)},
                "loop policy": type(asyncio.get_event_loop_policy()),
                "warnings": list(warnings.filters),
                "log handlers": list(logging.getLogger().handlers),
                "sharing": torch.multiprocessing.get_sharing_strategy(),
                "torch threads": torch.get_num_threads(),
                "random": random.getstate(),
                "torch random": torch.get_rng_state().tolist(),
                "numpy random": numpy.random.get_state()[1].tolist(),
                "environment": dict(os.environ),
                "excepthook": sys.excepthook,
                "DataLoader": torch.utils.data.DataLoader,
            }

        before = state()
        import asyncloader, asyncloader.workers, asyncloader.transports
        after = state()
        changed = [name for name in before if before[name] != after[name]]
        assert not changed, {name: (before[name], after[name]) for name in changed}
        """
    )


def test_import_brings_no_bare_workers_or_transports() -> None:
    """Also from the repository root, where the folders can be seen, ours are found under asyncloader only."""
    in_fresh_interpreter(
        """
        import sys
        import asyncloader, asyncloader.workers, asyncloader.transports
        assert not {"workers", "transports"} & set(sys.modules)
        """
    )
