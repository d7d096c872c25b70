"""Where hostile and honest peers meet: nodes and honest loaders in processes of their own, which are watched."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar, Self

from tests.helpers.running import PATIENCE_S, ROOT, environment
from tests.processes import children_of
from tests.service.certificates import make_authority
from tests.service.serving import NodeProcess, serving
from tests.stress.hostility import CONTENT, ESCAPE, ORDER, Case, rng_of
from tests.stress.peer_child import AT_A_TIME, RECORD, record
from tests.stress.peer_loader import Connection, Place, Stalled, play
from tests.stress.peer_node import HostileNode

STALL_S = 3.0
"""Seconds without a batch that an honest loader may see, besides those in which the machine is busy."""
GROWTH = 256 << 20
"""Bytes of memory that hostile loaders may make a node's process take."""
LOG_BYTES = 256 << 10
"""Bytes of a node's log that one hostile loader may cause."""
DEADLINE_S = 15.0
"""Seconds that a loader may take for its epoch after the last connection in which the node did something hostile: some
times what `Service(wait=)` says.
"""
_STANDING = 48
"""Connections that are left standing at a time."""
_NAMES = ["numbers", "awaited", "stream", "large"]
_TOKEN = "correct horse"
_WAIT_S = 2.0
_KILLED = ("signal: Killed", "SIGKILL")  # a loader may have the process killed that works on its task
_RAW = ESCAPE[:5].encode()


class _Lag:
    """How long this process is kept from running by the machine's other work."""

    def __init__(self) -> None:
        self._late: deque[tuple[float, float]] = deque(maxlen=500)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before = monotonic()
        while not self._over.wait(0.02):
            now = monotonic()
            self._late.append((now, now - before - 0.02))
            before = now

    def seconds(self) -> float:
        """In the last 10 seconds."""
        return sum(late for when, late in list(self._late) if when > monotonic() - 10 and late > 0.02)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


class _Memory:
    """The most memory that each process of a family has taken, in bytes."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._base: dict[int, int] = {}
        self._base = self.now()

    def now(self) -> dict[int, int]:
        """By process."""
        found: dict[int, int] = {}
        pids = [self.pid]
        while pids:
            pid = pids.pop()
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                if "VmHWM:" in status:
                    found[pid] = int(status.partition("VmHWM:")[2].split()[0]) << 10
                pids += children_of(pid)
        return found

    def grown(self) -> str | None:
        """The process that has taken too much. A later process is compared with the one that had the most."""
        usual = max((size for pid, size in self._base.items() if pid != self.pid), default=0)
        for pid, size in self.now().items():
            if size > self._base.get(pid, usual) + GROWTH:
                role = "the node" if pid == self.pid else "a process of the node"
                return f"memory: {role} took {(size - self._base.get(pid, usual)) >> 20} MB more than before"
        return None


class Child:
    """A process with honest loaders.

    Args:
        folder: for its log.
        arguments: of `peer_child`.
    """

    AT_A_TIME: ClassVar[int] = AT_A_TIME

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log = folder / f"child-{os.urandom(4).hex()}.log"
        with self.log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.stress.peer_child", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env=environment() | {"PYTHONWARNINGS": "ignore"},
            )
        self.lines: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed, suppress(ValueError):
                self.lines.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def tell(self, **line: Any) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        with self._changed, suppress(OSError):
            self.process.stdin.write(json.dumps(line) + "\n")
            self.process.stdin.flush()

    def line_with(self, seconds: float, **wanted: Any) -> dict[str, Any] | None:
        """Wait for a line with these values, and take it. None: it has ended, or time is over."""
        until = monotonic() + seconds
        with self._changed:
            while True:
                for line in self.lines:
                    if wanted.items() <= line.items():
                        self.lines.remove(line)
                        return line
                if self._ended or not self._changed.wait(max(0.0, until - monotonic())):
                    return None

    def exit_code(self) -> int | None:
        """How it ended; None: it has not."""
        if self._ended:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(5)
        return self.process.poll()

    def stacks(self) -> str:
        """The stacks of its threads, from its log."""
        with suppress(OSError):
            self.process.send_signal(signal.SIGUSR1)
            sleep(0.5)
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if line.startswith("  File") and "/asyncloader/" in line)[-1500:]

    def close(self) -> str:
        """End it. Returns why it ended badly; "" if well."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            told = f"an honest loader did not end: {self.stacks()}"
            self.process.kill()
            code = self.process.wait()
            self._reader.join()
            return told
        self._reader.join()
        return f"an honest loader's process ended with {code}: {self.log.read_text()[-1500:]}" if code else ""


class _Node:
    """A running node, with the figures that are watched."""

    def __init__(self, folder: Path, life: ExitStack, flags: list[str]) -> None:
        folder.mkdir()
        opened = [part for name in _NAMES if name != "large" for part in ("--open", name)]
        self.process: NodeProcess = life.enter_context(serving(folder, _NAMES, *opened, *flags, workers=2))
        (self._log,) = folder.glob("node-*.log")
        self._read = 0
        self.memory: _Memory | None = None

    def problems(self) -> list[str]:
        """The faults that were seen since the last call."""
        found: list[str] = []
        code = self.process.process.poll()
        if code is not None:
            found.append(f"crash: the node ended with {code}: {self._log.read_text(errors='replace')[-1500:]}")
        with self._log.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        self._read += len(text)
        said = text.decode(errors="replace")
        if "Traceback" in said:
            found.append(f"traceback: {said[said.index('Traceback') :][-1500:]}")
        if _RAW in text:
            found.append("log: control characters of a loader's are in the node's log")
        if len(text) > LOG_BYTES:
            found.append(f"log: {len(text):,} bytes at once, from {said[:500]!r} to {said[-200:]!r}")
        deaths = [line for line in said.splitlines() if "died" in line and not any(each in line for each in _KILLED)]
        found += [f"process: {line[:500]}" for line in deaths]
        if self.memory is not None and code is None and (grown := self.memory.grown()):
            found.append(grown)
        return found

    def descriptors(self) -> int:
        """How many it has open."""
        try:
            return len(os.listdir(f"/proc/{self.process.process.pid}/fd"))  # noqa: PTH208
        except OSError:
            return 0


# --------------------------------------------------------------------------------------------- hostile loaders


class LoaderArena:
    """Two nodes, and a process with three honest loaders that read at them all the time."""

    def __init__(self) -> None:
        self._life = ExitStack()
        self._standing: deque[Connection] = deque()
        self._lag = _Lag()
        self._stalled: list[str] = []

    def start(self) -> None:
        """Start all of it."""
        life = self._life
        folder = Path(life.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        files = make_authority(folder)
        (folder / "token").write_text(_TOKEN)
        tls = ["--tls-cert", files["node_cert"], "--tls-key", files["node_key"]]
        self._plain = _Node(folder / "plain", life, [])
        self._guarded = _Node(folder / "guarded", life, [*tls, "--token-file", str(folder / "token")])
        self._places = {
            "tcp": Place(self._plain.process.tcp),
            "unix": Place(self._plain.process.unix),
            "tls": Place(self._guarded.process.tcp, _TOKEN, files["ca"]),
        }
        path = folder / "records"
        path.write_bytes(bytes(RECORD * len(self._places)))
        with path.open("r+b") as file:
            self._records = mmap.mmap(file.fileno(), 0)
        places = [{"url": url, "token": token, "tls_ca": ca} for url, token, ca in self._places.values()]
        self._child = Child(folder, "steady", str(path), *map(json.dumps, places))
        assert self._child.line_with(60, ready=True), self._child.log.read_text()
        self._await_batches()
        for node in (self._plain, self._guarded):
            node.memory = _Memory(node.process.process.pid)
            node.problems()
        self._descriptors = [node.descriptors() for node in (self._plain, self._guarded)]

    def _await_batches(self) -> None:
        """Wait until each honest loader has got a batch from now on; 20 seconds at most."""
        began = monotonic()
        while min(record(self._records, number) for number in range(len(self._places))) < began:
            if monotonic() > began + 20 or self._child.exit_code() is not None:
                return
            sleep(0.02)

    def play(self, case: Case) -> str:
        """Play a case. Returns how far it came."""
        try:
            peer, told = play(case, self._places[case.place])
        except Stalled as error:
            self._stalled.append(f"stall: {error}")
            return "stalled"
        for each in list(self._standing):
            if not each.trickle():
                self._standing.remove(each)
                each.close()
        if peer is not None:
            self._standing.append(peer)
        if len(self._standing) > _STANDING:
            self._standing.popleft().close()
        return told

    def look(self, seconds: float = 0.0) -> list[str]:
        """The faults now, or the first that appear in these seconds."""
        until = monotonic() + seconds
        while not (found := self._problems()) and monotonic() < until:
            sleep(0.1)
        return found

    def _problems(self) -> list[str]:
        found = [*self._stalled, *self._plain.problems(), *self._guarded.problems()]
        self._stalled = []
        if self._child.exit_code() is not None:
            while line := self._child.line_with(0):
                found.append(f"wrong: {line.get('error') or line}")
            found.append(f"crash: the honest loaders ended with {self._child.exit_code()}")
        allowed = STALL_S + self._lag.seconds()
        while self._child.lines:
            line = self._child.lines.popleft()
            if "error" in line:
                found.append(f"wrong: {line['error']}")
            elif line.get("gap", 0.0) > allowed:
                found.append(f"stall: {line['loader']} got no batch for {line['gap']:.1f} s")
        for number, place in enumerate(self._places):
            age = monotonic() - record(self._records, number)
            if age > allowed:
                found.append(f"stall: the loader over {place} has got no batch for {age:.1f} s")
        return found

    def settle(self) -> list[str]:
        """Close all connections that were left open, and check that the nodes survive this."""
        while self._standing:
            self._standing.popleft().close()
        self._await_batches()
        until = monotonic() + 10
        many = [0, 0]
        while monotonic() < until:
            many = [node.descriptors() for node in (self._plain, self._guarded)]
            # The processes that were started for these loaders stay for some minutes, with 4 each: 22 to 28 after 160
            # draws, and no more after 640.
            if all(now <= before + 40 for now, before in zip(many, self._descriptors, strict=True)):
                break
            if found := self._problems():
                return found
            sleep(0.1)
        else:
            return [f"descriptors: {self._descriptors} before, {many} now", *self._problems()]
        return self._problems()

    def restart(self) -> None:
        """Start again with new processes."""
        self._end()
        self.start()

    def _end(self) -> list[str]:
        while self._standing:
            self._standing.popleft().close()
        self._child.process.kill()
        self._child.close()
        self._records.close()
        for node in (self._plain, self._guarded):
            node.process.process.kill()  # it is not needed any more, and its end is no part of a finding
            node.process.process.wait()
        life, self._life = self._life, ExitStack()
        with suppress(AssertionError):
            life.close()
        return []

    def close(self) -> None:
        """End all of it."""
        with suppress(AttributeError):  # it has not begun
            self._end()
        self._lag.close()


# ------------------------------------------------------------------------------------------------ hostile nodes


@dataclass
class Finding:
    """The result of an honest loader with a hostile node."""

    address: str
    exact: bool = True
    error: str = ""
    batches: int = 0
    seconds: float = 0.0
    crash: str = ""
    hang: str = ""
    acted: int = 0
    disturbed: bool = field(default=False)
    """Whether another case may have been the cause."""


def verdict(case: Case, finding: Finding) -> list[str]:
    """The faults of a finding."""
    if finding.crash:
        return [f"crash: {finding.crash}"]
    if finding.hang:
        return [f"hang: {finding.hang}"]
    found: list[str] = []
    if not finding.exact and case.act not in CONTENT:
        found.append(f"wrong: not the batches of local workers: {finding.error}")
    if finding.error and finding.exact:
        if case.script == "beside" and case.act not in CONTENT | ORDER:
            found.append(f"error: beside an honest node, after {finding.batches} batches: {finding.error}")
        elif case.script == "alone" and finding.address not in finding.error and case.act not in CONTENT | ORDER:
            found.append(f"error: does not name {finding.address}: {finding.error}")
    return found


class NodeArena:
    """An honest node, and a process with honest loaders. For use in `with`."""

    def __init__(self) -> None:
        self._life = ExitStack()
        self._lock = threading.Lock()
        self._number = 0
        self._running: set[int] = set()
        self._ends: list[str] = []

    def __enter__(self) -> Self:
        self._folder = Path(self._life.enter_context(tempfile.TemporaryDirectory(prefix="peers-")))
        self._node = _Node(self._folder / "node", self._life, [])
        self._begin()
        return self

    def _begin(self) -> None:
        self._child = Child(self._folder, "cases")
        assert self._child.line_with(60, ready=True), self._child.log.read_text()
        self._memory = _Memory(self._child.process.pid)

    def __exit__(self, *exception: object) -> None:
        self._child.close()
        self._life.close()

    def _alive(self) -> Child:
        with self._lock:
            if self._child.exit_code() is not None:
                self._child.close()
                self._begin()
            return self._child

    def play(self, case: Case) -> Finding:
        """Play a case."""
        rng = rng_of(case.seed, "loader")
        child = self._alive()
        honest = self._node.process.unix if case.place == "unix" else self._node.process.tcp
        hostile = HostileNode(case, honest, str(self._folder))
        urls = [hostile.address, *([honest] if case.script == "beside" else [])]
        rng.shuffle(urls)
        with self._lock:
            self._number = number = self._number + 1
            self._running.add(number)
            alone = len(self._running) == 1
        finding = Finding(hostile.address)
        try:
            request: dict[str, Any] = {"number": number, "name": case.name, "url": ",".join(urls), "wait": _WAIT_S}
            # Of two nodes one worker would read from one, which may be the honest one.
            workers = 2 if case.script == "beside" else rng.choice([1, 2])
            child.tell(**request, workers=workers, asynchronous=rng.random() < 0.5)
            line, acted = None, -1
            while line is None and hostile.acted > acted:  # each connection that breaks off may have brought batches
                acted = hostile.acted
                line = child.line_with(DEADLINE_S, number=number)
            with self._lock:
                finding.disturbed = not (alone and len(self._running) == 1)
            if line is not None:
                finding.exact, finding.error = line["exact"], line["error"]
                finding.batches, finding.seconds = line["batches"], line["seconds"]
            elif (code := child.exit_code()) is not None:
                finding.crash = (
                    f"the loader's process ended with {code}: {child.log.read_text(errors='replace')[-1500:]}"
                )
            else:
                finding.hang = f"no end after {DEADLINE_S:.0f} s, in {hostile.acted} hostile connections"
                if not finding.disturbed:
                    finding.hang += f": {child.stacks()}"
        finally:
            with self._lock:
                self._running.discard(number)
            hostile.close()
            finding.acted = hostile.acted
        return finding

    def problems(self) -> list[str]:
        """The faults of the honest peers at the end."""
        found = self._node.problems()
        for log in self._folder.glob("child-*.log"):
            if _RAW in log.read_bytes():
                found.append("log: control characters of a node's are in the loader's log")
        if grown := self._memory.grown():
            found.append(grown.replace("the node", "the loader"))
        return found
