"""Fixtures and hooks of all tests: a leak check, and each async test runs on asyncio and on uvloop.

A test leaves nothing behind: no child process, thread, file descriptor, mapped segment, name in /dev/shm, signal
handler, or pending task. The check compares the resources before and after, once garbage is collected. It waits only
for events that end a resource (a thread's end, a process's exit), never for time to pass.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import logging
import os
import re
import select
import signal
import sys
import threading
import tomllib
import zlib
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests import early_fork, script_server
from tests.pairwise import covering
from tests.processes import helpers_of_multiprocessing, own_children

try:
    import uvloop
except ImportError:  # tests/gpu runs where only torch, numpy and pytest are installed
    uvloop = None  # type: ignore[assignment]

if "PYTEST_XDIST_WORKER" in os.environ:
    # Its `__main__` is that of `python -c`, as in an interactive session. Give it a spec, as a program has: the spec of
    # a module that a spawned process can import instead.
    sys.modules["__main__"].__spec__ = find_spec("token")

# Helpers with asserts are not named test_*, and their asserts should be rewritten, too. All are listed here, because
# files of one folder import those of another, and registering a module that was imported already gives a warning, hence
# an error.
ASSERTING = [
    "delivery.answers",
    "delivery.fake",
    "delivery.stages",
    "helpers.comparing",
    "helpers.forking",
    "helpers.running",
    "clients.frameworks.helping",
]
pytest.register_assert_rewrite(*(f"tests.{helper}" for helper in ASSERTING))

LINUX = sys.platform.startswith("linux")

# How long a thread or process may take to end. Reached only by a leak, or on a badly overloaded machine.
GRACE_S = 20.0

FAILED = pytest.StashKey[bool]()

SIGNALS = [int(number) for number in signal.valid_signals()]  # without the two that glibc reserves for its threads
if LINUX:
    SIGNALS.remove(signal.SIGCHLD)

# glibc keeps freed blocks below its highest block in use: hundreds of megabytes after tests of large batches.
MALLOC_TRIM: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None) if LINUX else None


# ------------------------------------------------------------------------------------------- the loop matrix


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add options for the number of tests, and settings of missing plugins, which pytest would refuse as unknown."""
    words = "every pair of parameters' values, all that is drawn, each test on both loops, and those marked thorough"
    parser.addoption("--all", action="store_true", help=words)
    words = "each value, and thorough tests of files that must detect a planted bug: what `.ci/run` runs"
    parser.addoption("--ci", action="store_true", help=words)
    parser.addoption("--combinations", action="store_true", help="every combination of parameters; implies --all")
    settings = {
        "asyncio": ["mode", "debug", "default_fixture_loop_scope", "default_test_loop_scope"],
        "timeout": [""],
    }
    for plugin, names in settings.items():
        if not pluginmanager.hasplugin(plugin):
            for name in names:
                parser.addini(f"{plugin}_{name}".rstrip("_"), "of a plugin that is not installed")


def pytest_configure(config: pytest.Config) -> None:
    """Set the number of examples that drawn tests draw. Restore SIGINT's handler, which tests and their programs need:
    a shell starts a job in the background with SIGINT ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(ImportError):  # tests/gpu runs where only torch, numpy and pytest are installed
        from tests.drawn import choose

        choose(whole=bool(config.getoption("--all") or config.getoption("--combinations")))


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every async test on asyncio and, where it is installed, on uvloop."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if uvloop is not None:
        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select a few combinations of each test's parameters: with `--all` each pair of values, else each value.

    Two values are in no pair that must be kept: one of asyncio and uvloop in a test that is not marked `loops`, because
    the other loop is in every pair; and spawned workers, each of which imports torch, in a test that is not marked
    `spawns` and also runs with other methods, because workers of a fork server start the same way from there on. No
    value of a test marked `independent` is in such a pair. Without `--all` those two values are left out, and
    `thorough` tests; with `--ci` the latter run in files that must detect a planted bug (mutants.toml).

    Without `--ci` a file that is named on the command line runs as with `--all`, and a test that is named runs in all
    combinations.
    """
    if config.getoption("--combinations") or any("::" in argument for argument in config.args):
        return
    ci = config.getoption("--ci")
    whole = config.getoption("--all") or (not ci and all(argument.endswith(".py") for argument in config.args))
    detecting = _detecting(config.rootpath) if ci else set[Path]()
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if whole or item.get_closest_marker("thorough") is None or item.path in detecting:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept: set[pytest.Item] = set()
    for name, group in groups.items():
        rows = {_row(item): item for item in group}
        replaced: dict[str, set[str]] = {}
        if group[0].get_closest_marker("loops") is None:
            loops = ["asyncio", "uvloop"]
            replaced[loops.pop(zlib.crc32(name.encode()) % 2)] = {*loops}
        if group[0].get_closest_marker("spawns") is None:
            replaced["spawn"] = {"fork", "forkserver"}
        in_pairs = whole and group[0].get_closest_marker("independent") is None
        alone = {value for value, others in replaced.items() if _without(rows, value, others) is not rows}
        if not whole:
            for value in alone:
                rows = _without(rows, value, replaced[value])
        kept.update(list(rows.values())[number] for number in covering(list(rows), in_pairs=in_pairs, alone=alone))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _detecting(root: Path) -> set[Path]:
    """Return the files of which a test must fail by a bug that `tests/mutants.py` plants."""
    bugs = tomllib.loads((root / "tests" / "mutants.toml").read_text(encoding="utf-8")).values()
    return {(root / "tests" / file).resolve() for bug in bugs for file in bug["tests"].split()}


def _without(
    rows: dict[tuple[str, ...], pytest.Item], value: str, others: set[str]
) -> dict[tuple[str, ...], pytest.Item]:
    """Return the rows without this value; all rows if no other value takes its place, or if others would be lost
    with it.
    """
    left = {row: item for row, item in rows.items() if value not in row}
    kept = {each for row in left for each in enumerate(row)}
    lost = {each for row in rows for each in enumerate(row)} - kept
    replaced = all(any((column, other) in kept for other in others) for column, _ in lost)
    return left if replaced and lost and {each for _, each in lost} <= {value} else rows


def _row(item: pytest.Item) -> tuple[str, ...]:
    """Return the id of the value of each of the test's parametrizations; () for a test without parameters."""
    callspec: Any = getattr(item, "callspec", None)
    return () if callspec is None else tuple(map(str, callspec._idlist))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the imports' objects from every later garbage collection: they are many, and no test made them."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Run uvloop once first: libuv opens a pair of descriptors for the process when it is first used.

    Also let torch's forty loggers propagate: six times per test pytest adds a handler to each logger that does not.
    """
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    if uvloop is not None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(asyncio.sleep(0))


# -------------------------------------------------------------------------------------------- the leak check


@dataclass(frozen=True)
class World:
    """The resources of this process at one moment. Each field maps a resource to a text that describes it."""

    children: dict[int, str]
    threads: dict[threading.Thread, str]
    descriptors: dict[tuple[int, str], str]
    segments: dict[str, str]
    shared_names: dict[str, str]
    signal_handlers: dict[int, str]

    @classmethod
    def now(cls) -> World:
        return cls(
            children=_children(),
            threads={thread: repr(thread) for thread in threading.enumerate()},
            descriptors=_descriptors(),
            segments=_segments(),
            shared_names=_shared_names(),
            signal_handlers=_signal_handlers(),
        )

    def since(self, before: World) -> list[str]:
        """Return the resources that exist now and did not before, a line for each."""
        return [
            f"{kind[:-1].replace('_', ' ')}: {words}"
            for kind in ("children", "threads", "descriptors", "segments", "shared_names", "signal_handlers")
            for thing, words in getattr(self, kind).items()
            if thing not in getattr(before, kind)
        ]


def _children() -> dict[int, str]:
    if not LINUX:
        return {}
    found = {}
    for pid in own_children():
        entry = Path("/proc", str(pid))
        try:
            # pid (command) state ppid ...: the command may hold spaces and brackets, so split after the last bracket
            state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended since it was listed
        if int(ppid) == os.getpid():
            what = "ended, but nobody waited for it" if state == "Z" else f"state {state}"
            found[int(entry.name)] = f"pid {entry.name} ({what}) {command.strip()}"
    return found


def _descriptors() -> dict[tuple[int, str], str]:
    if not LINUX:
        return {}
    helpers = helpers_of_multiprocessing()[1] | script_server.descriptors()
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - `Path` takes ten times as long
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue  # the descriptor of this very listing
        # CUDA opens its devices when it needs them, and keeps them open as long as the process lives.
        if int(name) not in helpers and not target.startswith(("/dev/nvidia", "/dev/dri/")):
            found[int(name), target] = f"{name} -> {target}"
    return found


def _segments() -> dict[str, str]:
    """Return mapped anonymous segments of ours, by address range. A tensor that views a slot keeps its segment."""
    if not LINUX:
        return {}
    maps = Path("/proc/self/maps").read_text()
    if "memfd:asyncloader" not in maps:
        return {}
    return {line.split()[0]: line for line in maps.splitlines() if "memfd:asyncloader" in line}


def _shared_names() -> dict[str, str]:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return {}
    return {path.name: str(path) for path in shm.iterdir() if re.search("asyncloader", path.name)}


def _signal_handlers() -> dict[int, str]:
    """Return the signals that the process handles, in Python or in C: torch's workers have handlers in C.

    SIGCHLD is left out: torch handles it in every process that has had a loader of torch's with workers.
    """
    if not LINUX:
        return {}
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    caught = int(mask, 16)
    return {number: str(number) for number in SIGNALS if caught >> (number - 1) & 1}


def _wait_for_endings(before: World) -> None:
    """Wait until every new thread and child has ended, or the grace is over."""
    for thread in threading.enumerate():
        if thread not in before.threads and thread is not threading.current_thread():
            thread.join(GRACE_S)
    for pid in _children().keys() - before.children.keys():
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([pidfd], [], [], GRACE_S)
        finally:
            os.close(pidfd)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record which tests did not pass, and that the last test did not."""
    report = yield
    if report.failed or report.skipped:
        item.stash[FAILED] = item.session.stash[FAILED] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let tests marked `spawns` start interpreters for spawned processes and fork servers, as programs do."""
    with early_fork.interpreters() if item.get_closest_marker("spawns") else nullcontext():
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def free_memory_returned() -> Iterator[None]:
    """Return the memory that a file's tests freed to the system: later forks would copy its page tables each time."""
    yield
    gc.collect()
    if MALLOC_TRIM is not None:
        MALLOC_TRIM(0)


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a passing test that leaves resources behind. (Those of a failing test are held by its traceback.)"""
    gc.collect()
    # Objects that have survived belong to pytest, the imports or a wider fixture, and to no test. Frozen, they cost no
    # time in this test's collections (after some thousand tests it was a tenth of a second each, more than most tests
    # take), and no memory in forked children. After a failed test no objects are frozen: pytest drops its traceback
    # only after this, and then they must be collected, or their threads and descriptors would never be freed.
    if not request.session.stash.get(FAILED, False):
        gc.freeze()
    request.session.stash[FAILED] = False
    before = World.now()
    yield
    if request.node.stash.get(FAILED, False):
        return
    gc.collect()
    leaks = World.now().since(before)
    if leaks:
        _wait_for_endings(before)
        gc.collect()
        leaks = World.now().since(before)
    if leaks:
        pytest.fail("left behind by this test:\n  " + "\n  ".join(leaks), pytrace=False)


@pytest.fixture(autouse=True)
def task_check(request: pytest.FixtureRequest, leak_check: None) -> None:
    """Request the check below for async tests only, so that sync tests get no event loop."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("no_pending_tasks")


@pytest.fixture
async def no_pending_tasks(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail a passing test that ends with tasks pending on its loop.

    This fixture is set up before the test's other async fixtures, hence torn down after them.
    """
    yield
    if request.node.stash.get(FAILED, False):
        return
    pending = asyncio.all_tasks() - {asyncio.current_task()}
    if pending:
        listing = "\n  ".join(repr(task) for task in pending)
        pytest.fail(f"tasks left pending by this test:\n  {listing}", pytrace=False)
