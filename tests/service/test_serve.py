"""The command `asyncloader serve`: its output, the sources of its options, and the mistakes that it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.__main__ import main
from asyncloader.service.node import cli
from asyncloader.service.node.metrics_endpoint import MetricsEndpoint
from tests import script_server
from tests.helpers.running import PATIENCE_S, ROOT, environment, run_script
from tests.service import definitions
from tests.service.serving import MODULE, serving

NUMBERS = f"{MODULE}:numbers"


def serve(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = f"""
import os, sys
from asyncloader.__main__ import main
if __name__ == "__main__":
    os.environ.update({variables!r})
    sys.exit(main(["serve", *{flags!r}]))
"""
    return run_script(folder, program)


MISTAKES = {
    "nothing": ([], "nothing to serve: give module:definition, as in data:train"),
    "no such definition": ([f"{MODULE}:nothing"], "has no definition 'nothing'; it has numbers"),
    "an argument that nobody takes": ([NUMBERS, "--arg", "m=1"], "--arg m: no definition that is served has"),
    "an argument without a value": ([NUMBERS, "--arg", "n"], "--arg n: give name=value"),
    "an argument of another type": ([NUMBERS, "--arg", "n=many"], "numbers(n=): 'many' is no int"),
    "an open definition that is not served": ([NUMBERS, "--open", "train"], "--open train: numbers is served"),
    "the whole world": ([NUMBERS, "--listen", "0.0.0.0:0"], "can be reached from other machines: give --token-file"),
    "no port": ([NUMBERS, "--listen", "127.0.0.1"], "is no address: give host:port or unix:/path"),
    "no such folder": (
        [NUMBERS, "--listen", "unix:/no/node"],
        "--listen unix:/no/node: No such file or directory: give",
    ),
    "no such certificate": (
        [NUMBERS, "--tls-cert", "/no", "--tls-key", "/key"],
        "--tls-cert /no --tls-key /key: No such",
    ),
    "no workers": ([NUMBERS, "--workers", "0"], "--workers 0: give a number of processes, at least 1"),
    "a key without a certificate": ([NUMBERS, "--tls-key", "key"], "--tls-key and --tls-ca need --tls-cert"),
    "no such file": ([NUMBERS, "--token-file", "/nowhere"], "No such file or directory: '/nowhere'"),
    "a dataset that cannot be made": ([f"{MODULE}:impossible"], "impossible raised OSError: no disk"),
    "one of two that cannot be made": ([NUMBERS, f"{MODULE}:impossible"], "impossible raised OSError: no disk"),
    "a definition that kills its process": ([f"{MODULE}:fatal"], "fatal: its process died before it had the dataset"),
    "a definition that exits": ([f"{MODULE}:leaving"], "leaving raised SystemExit: wrong flags"),
    "a dataset without a length": ([f"{MODULE}:endless"], "Endless has no length"),
}


@pytest.mark.parametrize(("flags", "text"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(flags: list[str], text: str, tmp_path: Path) -> None:
    """The error is one line that names the remedy, and the exit code is 2."""
    done = serve(tmp_path, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    *_, last = done.stderr.splitlines()
    assert last.startswith("asyncloader serve: ")
    assert text in last


@pytest.mark.parametrize(
    ("module", "code", "last"),
    [
        ("raise RuntimeError('no disk')", 2, "asyncloader serve: RuntimeError: no disk"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_mistakes_before_the_node(
    module: str, code: int, last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A module that raises, and Ctrl-C while it is imported."""
    monkeypatch.setattr(cli, "set_up_log", lambda _: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "served_module.py").write_text(module)
    assert main(["serve", "served_module:rows"]) == code
    assert (capsys.readouterr().err.splitlines() or [""])[-1].endswith(last)


async def test_metrics_at_an_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their URL has brackets around the address, without which it could not be read."""
    sock = SimpleNamespace(getsockname=lambda: ("::1", 9090, 0, 0))  # not every machine has IPv6

    async def start_server(*arguments: Any, **options: Any) -> Any:
        return SimpleNamespace(sockets=[sock])

    monkeypatch.setattr(asyncio, "start_server", start_server)
    endpoint = MetricsEndpoint(None)  # type: ignore[arg-type]
    await endpoint.listen("[::1]:0")
    assert endpoint.address == "http://[::1]:9090"


def figures(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{address}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line[0] != "#")}


@pytest.mark.thorough
def test_figures_and_a_loader_that_is_killed(tmp_path: Path) -> None:
    """The endpoints report the state of the node; a loader that is killed holds no connection."""
    program = """
import sys
from asyncloader import DataLoader
from tests.service import definitions
batches = iter(DataLoader(definitions.numbers(), 2, seed=1, num_workers=3, workers=sys.argv[1]))
next(batches)
print("reading", flush=True)
sys.stdin.read()
"""
    with serving(tmp_path, ["numbers"], "--metrics", "127.0.0.1:0") as node:
        metrics = node.said["metrics"]
        for page, text in (("healthz", b"ok"), ("readyz", b"ready")):
            with urllib.request.urlopen(f"{metrics}/{page}", timeout=PATIENCE_S) as answer:
                assert answer.read().strip() == text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{metrics}/other", timeout=PATIENCE_S)
        for address in (node.tcp, node.unix):
            with script_server.start(
                [sys.executable, "-c", program, address], stdin=subprocess.PIPE, cwd=ROOT, env=environment()
            ) as loader:
                assert loader.stdout is not None
                assert loader.stdout.readline() == "reading\n"
                while not (now := figures(metrics))["asyncloader_node_tasks_total"]:
                    pass  # a task is counted after its answer
                assert now["asyncloader_node_lanes"] == 3
                assert now["asyncloader_node_sessions"] == 1
                assert now["asyncloader_node_processes"] == 2
                assert now["asyncloader_node_busy_seconds_total"] > 0
                loader.send_signal(signal.SIGKILL)
            while (now := figures(metrics))["asyncloader_node_lanes"]:
                pass
            assert not now["asyncloader_node_sessions"]
        options: dict[str, Any] = {"batch_size": 2, "seed": 1, "num_workers": 2}
        assert len(list(DataLoader[Any](definitions.numbers(), **options, workers=node.tcp))) == 20


@pytest.mark.thorough
def test_options_from_the_environment(tmp_path: Path) -> None:
    """A flag goes before the environment. A configuration file, which was once read, is refused."""
    variables = {"ASYNCLOADER_TARGET": NUMBERS, "ASYNCLOADER_ARG": "n=6", "ASYNCLOADER_WORKERS": "1"}
    listening = f"unix:{tmp_path}/b"
    command = [sys.executable, "-m", "asyncloader", "serve", "--arg", "n=8"]
    own = environment() | variables | {"ASYNCLOADER_LISTEN": listening}
    with script_server.start(command, cwd=ROOT, env=own) as node:
        assert node.stdout is not None
        said = json.loads(node.stdout.readline())
        assert said["listening"] == listening
        assert said["pid"] == node.pid
        loader = DataLoader[Any](definitions.numbers(), 2, seed=1, num_workers=1, workers=listening)
        assert len(loader) == 4
        os.kill(node.pid, signal.SIGTERM)
        assert node.wait(PATIENCE_S) == 0
    assert not Path(listening.removeprefix("unix:")).exists()
    assert "--workers none" in serve(tmp_path, NUMBERS, ASYNCLOADER_WORKERS="none").stderr
    for removed in (serve(tmp_path, NUMBERS, "--config", "x"), serve(tmp_path, NUMBERS, ASYNCLOADER_CONFIG="x")):
        assert "--config was removed: give flags" in removed.stderr
