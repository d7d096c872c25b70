"""The view of a node: its loaders with their workers, rates and memory, its processes, and its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncloader import DataLoader
from asyncloader.__main__ import main
from asyncloader.live.client import LoaderSocket, open_sockets, receive_all
from tests.helpers.running import PATIENCE_S
from tests.service import definitions
from tests.service.serving import serving

pytestmark = pytest.mark.network


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes of this user may be watched at the same time."""
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


def following(opened: LoaderSocket, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Receive snapshots until one is as wanted."""
    while True:
        receive_all([opened], PATIENCE_S)
        assert opened.latest is not None
        assert not opened.ended
        if wanted(opened.latest):
            return opened.latest


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Run the command, which must find nothing wrong."""
    assert main(["top", *flags]) == 0
    return capsys.readouterr().out


def test_loaders_that_come_and_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has a row with its workers, in the terminal and as JSON. The node counts the batches that it sends, and not
    those that a loader on this machine shares with the processes. The row goes with the loader, the socket with the
    node.
    """
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "seed": 1}
    with serving(tmp_path, ["numbers"]) as node:
        (opened,) = open_sockets(None)
        first = following(opened, lambda found: bool(found["state"] == "serving"))
        assert (first["kind"], first["pid"], first["sessions"]) == ("node", node.process.pid, [])
        assert node.tcp in first["name"]
        assert len(first["processes"]) == 2
        with (
            DataLoader[Any](definitions.numbers(), **options, workers=node.tcp) as far,
            DataLoader[Any](definitions.numbers(), **options, workers=node.unix) as near,
        ):
            relayed_batches, near_batches = iter(far), iter(near)
            next(relayed_batches)
            next(near_batches)
            found = following(opened, lambda now: sum(each["workers"] for each in now["sessions"]) == 4)
            relayed, shared = sorted(found["sessions"], key=lambda each: -each["relayed"])
            assert (relayed["workers"], relayed["relayed"], relayed["peer"]) == (2, 2, "127.0.0.1")
            assert (shared["workers"], shared["relayed"], shared["peer"]) == (2, 0, "this machine")
            assert relayed["dataset"] == "tests.service.definitions:numbers with no arguments"
            assert 0 < relayed["ring_bytes"] <= relayed["most_bytes"]
            pids = {each.pid for each in node.workers()}
            assert {own["pid"] for each in found["sessions"] for own in each["connections"]} <= pids
            assert len(list(relayed_batches)) == 9
            # Its workers end with the epoch, and the loader's row with them, unless it reads on.
            again = iter(far)
            next(again)
            done = following(opened, lambda now: any(each["batches"] for each in now["sessions"]))
            (sent,) = [each for each in done["sessions"] if each["relayed"]]
            assert sent["bytes"] >= sent["batches"] * 4 * 50 * 4
            assert sum(own["batches"] for own in sent["connections"]) == sent["batches"]
            found = json.loads(shown(capsys, "--json"))
            assert (found["ok"], found["loaders"], len(found["nodes"][0]["sessions"])) == (True, [], 2)
            lines = shown(capsys, str(opened.path))
            assert f"ok  node                  node at {node.addresses[0]}" in lines
            assert "2 workers, not counted: batches pass the node by" in lines
        following(opened, lambda now: not now["sessions"])
    while not opened.ended:
        opened.receive()
    opened.close()
    assert not opened.path.exists()
