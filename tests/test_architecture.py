"""The house rules that a reader relies on: layers, purity, one file one job, and quiet imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable

import pytest

from docs.house import FLOOR, FOLDERS, MODULES, PICTURE, ROOT, draw, imports, parsed, room

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKS = {"workers", "transports"}
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Pure: decisions and arithmetic only. They can be tested by examples, and read without knowing any I/O.
PURE = {f"asyncloader.{name}" for name in (ROOT / "tests/pure_modules.txt").read_text().split()}
IMPURE_IMPORTS = {"asyncio", "multiprocessing", "select", "selectors", "socket", "subprocess", "threading"}


def top_level_names(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_every_room_has_a_floor() -> None:
    """The tables above name every module, and no other: a module that moved is still covered by the rules."""
    assert FLOOR.keys() == {room(module) for module in MODULES}
    assert PURE - MODULES.keys() == set()


@pytest.mark.thorough
def test_modules_import_only_what_is_below_them() -> None:
    """The floors go from plain types up to the loaders and the bridges to frameworks."""
    too_high = [
        f"{module} imports {name}"
        for module in MODULES
        for name in imports(module) & MODULES.keys() - {"asyncloader"}
        if FLOOR[room(name)] > FLOOR[room(module)]
    ]
    assert not too_high


def test_no_two_modules_import_each_other() -> None:
    """Nor do more than two in a circle of imports: modules can be read in the order of imports."""
    below = {module: imports(module) & MODULES.keys() - {"asyncloader", module} for module in MODULES}
    while leaves := {module for module, names in below.items() if not names & below.keys()}:
        below = {module: names for module, names in below.items() if module not in leaves}
    assert not below


def test_the_picture_of_the_house_is_of_this_house() -> None:
    """After a change of rooms or imports, ``python docs/house.py`` draws it again."""
    assert PICTURE.read_text() == draw()


def test_a_trainer_does_not_load_the_server() -> None:
    """The client of a service imports neither the code of a node nor the code that places nodes, directly or not."""
    found: set[str] = set()
    left = {module for module in MODULES if module.startswith("asyncloader.service.client")}
    while left:
        module = left.pop()
        found.add(module)
        left |= imports(module) & MODULES.keys() - found
    assert not [each for each in found if each.startswith(("asyncloader.service.node", "asyncloader.service.node"))]


def test_workers_and_transports_do_not_know_each_other() -> None:
    """Moving batches between processes and reading remote bytes are two subjects."""
    pair = ("asyncloader.workers", "asyncloader.transports")
    for mine, other in (pair, pair[::-1]):
        for module in MODULES:
            if module.startswith(mine):
                assert not [name for name in imports(module, late=True) if name.startswith(other)], module


def test_pure_modules_do_no_io() -> None:
    """The modules that decide import no module that can wait, send or start something, at import or later."""
    impure = {module: top_level_names(imports(module, late=True)) & IMPURE_IMPORTS for module in sorted(PURE)}
    assert not {module: names for module, names in impure.items() if names}


def test_pure_modules_stand_on_pure_modules() -> None:
    """Our modules that a pure module imports are pure, too, or the rule above would prove little."""
    allowed = PURE | {package for package in FOLDERS if package != "asyncloader.delivery"}
    impure = {module: imports(module, late=True) & MODULES.keys() - allowed for module in sorted(PURE)}
    assert not {module: names for module, names in impure.items() if names}


def test_modules_that_call_themselves_pure_are_held_to_it() -> None:
    """Without the tests above, a docstring's "Pure" would be an unproven claim."""
    claims = {
        module for module, path in MODULES.items() if re.search(r"\bPure[.:]", ast.get_docstring(parsed(path)) or "")
    }
    assert not claims - PURE


def test_only_the_bridge_starts_a_loop() -> None:
    """The main process has one place where sync meets async, and a worker one where it starts its own loop."""
    starts = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"asyncio.run", "asyncio.Runner", "asyncio.new_event_loop", "uvloop.run"}
    }
    assert starts <= {"asyncloader.base.bridge", "asyncloader.workers.worker"}


def test_nothing_is_shielded_by_asyncio() -> None:
    """Its `shield` may let the event loop log an error that a caller receives, too; see `shielding.py`."""
    uses = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.shield"
    }
    assert not uses


def test_hooks_of_the_process_are_registered_in_one_place() -> None:
    """Each is registered once there, and `tests/test_finalizers.py` finds all of them."""
    uses = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in {"atexit.register", "os.register_at_fork", "threading._register_atexit"}
    }
    assert uses == {"asyncloader.base.process_hooks"}


def uses_default_executor(call: ast.Call) -> bool:
    """Whether a call runs a function in the loop's default executor, or lets asyncio look up a name there."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    match name:
        case "to_thread" | "ThreadedResolver" | "set_default_executor" | "sendfile" | "sock_sendfile":
            return True
        case "run_in_executor":
            return ast.unparse(call.args[0]) == "None"
        case "getaddrinfo" | "getnameinfo":
            return ast.unparse(function) != f"socket.{name}"
        case "open_connection" | "create_connection" | "start_server" | "create_server" | "create_datagram_endpoint":
            return "sock" not in {keyword.arg for keyword in call.keywords}
        case _:
            return False


def test_nothing_uses_the_default_executor() -> None:
    """It belongs to the program, whose calls may occupy all of its threads for any time."""
    found = {
        f"{module}: {ast.unparse(node.func)}"
        for module, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and uses_default_executor(node)
    }
    # It passes addresses, which asyncio does not look up.
    assert found == {"asyncloader.service.node.metrics_endpoint: asyncio.start_server"}


def test_no_deprecated_loop_calls() -> None:
    """The running loop is the user's: no policies, and no loop that is not the running one."""
    for path in MODULES.values():
        assert not re.findall(r"asyncio\.(?:get_event_loop\b|\w*_event_loop_policy)", path.read_text()), path


def test_third_party_imports_are_declared() -> None:
    """A package that a module needs at import is a runtime dependency; packages imported later may be extras."""

    def names(requirements: list[str]) -> set[str]:
        """Return the modules' names: a distribution's name may have a hyphen instead of an underscore."""
        found = {re.split(r"[<>=!;\[ ]", line, maxsplit=1)[0].lower().replace("-", "_") for line in requirements}
        return {name.removesuffix("_api") for name in found}  # opentelemetry-api

    runtime = names(PROJECT["project"]["dependencies"])
    extras = set().union(*(names(lines) for lines in PROJECT["project"]["optional-dependencies"].values()))
    extras |= {"litdata"}  # installed alone, behind its extra, because it requires a release of torch
    known = {"asyncloader", *sys.stdlib_module_names}
    for module in MODULES:
        # Some modules may import extras: a bridge to a framework is imported by programs that have the framework; the
        # service, with its extra; the conformance tests, by test modules, which have pytest.
        bridge = module.startswith(
            ("asyncloader.integrations.", "asyncloader.service.", "asyncloader.transports.testing")
        )
        early = runtime | extras if bridge else runtime
        assert top_level_names(imports(module)) - known <= early, module
        assert top_level_names(imports(module, late=True)) - known <= runtime | extras, module


def test_modules_say_what_they_are() -> None:
    """Every module opens with a docstring, and its first line is a whole sentence or a title."""
    for module, path in MODULES.items():
        docstring = ast.get_docstring(parsed(path))
        assert docstring, module
        assert len(docstring.splitlines()[0]) > 20, module


PARTS_OF_DATALOADER2 = {"FullSync", "PinMemory"}
"""In torchdata an adapter and the datapipe that it adds have the same name."""


def test_class_names_are_unique() -> None:
    """Over all packages, a name stands for one class."""
    found = Counter(
        node.name for path in MODULES.values() for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in found.items() if number > 1} == PARTS_OF_DATALOADER2


def test_every_module_has_a_test_of_its_name_or_says_where_it_is_tested() -> None:
    """An engineer who changes a module finds the tests to run."""
    named = {path.stem.removeprefix("test_") for path in TESTS if path.stem.startswith("test_")}
    without = {
        module.removeprefix("asyncloader.")
        for module, path in MODULES.items()
        if not path.stem.startswith("__")
        and not any(name == path.stem or name.startswith(f"{path.stem}_") for name in named)
    }
    listed: dict[str, str] = {}
    for modules in tomllib.loads((ROOT / "tests" / "tested_by.toml").read_text()).values():
        listed |= modules
    assert listed.keys() == without
    assert not {place for place in listed.values() if not (ROOT / "tests" / place).exists()}


def test_files_are_short() -> None:
    """A file has one job: at most 500 lines, without comments, which should not be saved on."""
    lengths = {
        path: sum(not line.lstrip().startswith("#") for line in path.read_text().splitlines())
        for path in [*MODULES.values(), *TESTS]
    }
    assert not {path: length for path, length in lengths.items() if length > 500}


@pytest.mark.thorough
def test_tests_state_the_fact_tested() -> None:
    """Every test has a docstring; together these state the package's guarantees."""
    silent = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in TESTS
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]
    assert not silent


@pytest.mark.thorough
def test_packages_are_listed() -> None:
    """The build lists its packages one by one, so that a new sub-folder would be left out."""
    tops = (ROOT / name for name in ("asyncloader", *LINKS))
    nested = {
        folder
        for top in tops
        for folder in (top, *top.rglob("*"))
        if any(folder.glob("*.py")) and not any(each.is_symlink() for each in (folder, *folder.parents))
    }
    assert nested == set(FOLDERS.values())


@pytest.mark.thorough
def test_no_bare_import_of_the_checkout_folders() -> None:
    """A bare `import workers` in the checkout makes second copies of modules, whose classes differ from the first."""
    for path in [*MODULES.values(), *TESTS, *(ROOT / "docs").rglob("*.py")]:
        for node in ast.walk(parsed(path)):
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


@pytest.mark.thorough
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


def test_importing_a_loader_collects_no_garbage() -> None:
    """A full collection would take longer than the import. The collector works again afterwards."""
    in_fresh_interpreter(
        """
        import gc, torch.utils.data
        collections = []
        gc.callbacks.append(lambda phase, _: collections.append(phase))
        gc.set_threshold(100)
        del collections[:]
        from asyncloader import AsyncDataLoader, DataLoader
        gc.set_threshold(0)
        assert collections.count("stop") <= 4, collections
        assert gc.isenabled()
        """
    )


def test_a_local_loader_loads_nothing_of_remote_ones() -> None:
    """What only streams of shards, stores, devices and reports need is imported by loaders that have them."""
    in_fresh_interpreter(
        """
        import sys
        from asyncloader import DataLoader
        for workers in (0, 1):
            loader = DataLoader(range(2), num_workers=workers)
            assert [int(batch) for batch in loader] == [0, 1]
            loader.state_dict(), repr(loader)
        unneeded = (
            "asyncloader.dataloader2", "asyncloader.delivery.cuda", "asyncloader.delivery.transfer",
            "asyncloader.formats", "asyncloader.integrations", "asyncloader.remote",
            "asyncloader.service.protocol.connection", "asyncloader.shared", "asyncloader.telemetry.chrome",
            "asyncloader.telemetry.diagnosis", "asyncloader.telemetry.recording", "asyncloader.transports", "aiofiles",
            "html",
        )
        found = [name for name in sys.modules if name.startswith(unneeded)]
        assert not found, found
        """
    )


def test_import_brings_no_bare_workers_or_transports() -> None:
    """From the repository root, where the folders can be found, too, our packages are imported under asyncloader
    only.
    """
    in_fresh_interpreter(
        """
        import sys
        import asyncloader, asyncloader.workers, asyncloader.transports
        assert not {"workers", "transports"} & set(sys.modules)
        """
    )
