"""The manifests of the Kubernetes page are consistent, and their command runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from asyncloader import DataLoader, Service
from tests import script_server
from tests.docs.test_code_blocks import blocks
from tests.helpers.running import PATIENCE_S, ROOT, environment
from tests.service import definitions
from tests.service.serving import MODULE

PAGE = ROOT / "docs" / "how-to" / "serve-on-kubernetes.md"


def manifests() -> dict[str, Any]:
    texts = [block.text for block in blocks(PAGE.read_text()) if block.language == "yaml"]
    return {each["kind"]: each for text in texts for each in yaml.safe_load_all(text)}


def test_the_manifests_fit_together() -> None:
    """They agree on names, labels and ports."""
    found = manifests()
    deployment, service, scaler = (found[kind] for kind in ("Deployment", "Service", "HorizontalPodAutoscaler"))
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (container,) = template["spec"]["containers"]
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in container["args"])
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert flags["listen"] == f"0.0.0.0:{ports['loaders']}"
    assert flags["metrics"] == f"0.0.0.0:{ports['metrics']}"
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(ports["metrics"])
    assert service["spec"]["ports"] == [{"name": "loaders", "port": ports["loaders"]}]
    assert f'"dns+tcp://{service["metadata"]["name"]}:{ports["loaders"]}"' in PAGE.read_text()
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in template["spec"]["volumes"]}
    assert flags["token-file"] == f"{mounts['token']}/token"
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert template["spec"]["terminationGracePeriodSeconds"] > 30


def test_the_command_runs(tmp_path: Path) -> None:
    """It runs with this machine's addresses and a token of ours; the probes' paths and the scaler's figures exist."""
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    token = tmp_path / "token"
    token.write_text("correct horse\n")
    ours = {"--listen": "127.0.0.1:0", "--metrics": "127.0.0.1:0", "--token-file": str(token), "--arg": "n=12"}
    flags = [f"{name}={ours.get(name, value)}" for name, value in (flag.split("=", 1) for flag in container["args"])]
    program, verb, target = container["command"]
    assert (program, target) == ("asyncloader", "data:train")
    command = [sys.executable, "-m", program, verb, f"{MODULE}:numbers", *flags]
    with script_server.start(command, env=environment(), cwd=ROOT, stderr=subprocess.DEVNULL) as node:
        try:
            assert node.stdout is not None
            said = json.loads(node.stdout.readline())
            for probe in ("readinessProbe", "livenessProbe"):
                path = container[probe]["httpGet"]["path"]
                with urllib.request.urlopen(said["metrics"] + path, timeout=PATIENCE_S) as answer:
                    assert answer.status == 200
            service = Service("dns+" + said["listening"], token="correct horse")
            with DataLoader[Any](definitions.numbers(n=12), 4, seed=1, num_workers=2, workers=service) as loader:
                assert [batch["index"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
            with urllib.request.urlopen(said["metrics"] + "/metrics", timeout=PATIENCE_S) as answer:
                figures = dict(re.findall(r"(?m)^(asyncloader_node_\w+) (\S+)$", answer.read().decode()))
            (asked,) = (line for line in PAGE.read_text().splitlines() if "rate(" in line)
            names = re.findall(r"asyncloader_node_\w+", asked)
            assert len(names) == 2
            assert all(float(figures[name]) > 0 for name in names)
        finally:
            node.terminate()
