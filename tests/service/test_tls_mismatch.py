"""TLS that one side does not speak, or a certificate that it refuses: both report it at once, with what to change."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from asyncloader import DataLoader, Service, ServiceUnavailable
from tests.service import definitions
from tests.service.certificates import make_authority
from tests.service.serving import serving

OPTIONS: dict[str, Any] = {"batch_size": 4, "seed": 3, "num_workers": 1}


@pytest.mark.parametrize(
    ("node_has_it", "told", "logged"),
    [
        (
            True,
            r"is it a node, and does it speak TLS \(Service\(tls_ca=\)\)\?",
            "does not speak TLS, and this node does",
        ),
        (False, "it does not speak TLS: start the node with --tls-cert, or leave tls_ca= out", "this is protocol ALS1"),
    ],
)
def test_one_side_speaks_tls(node_has_it: bool, told: str, logged: str, tmp_path: Path) -> None:
    """The loader's error and the node's log say it."""
    files = make_authority(tmp_path)
    flags = ["--tls-cert", files["node_cert"], "--tls-key", files["node_key"]] if node_has_it else []
    with serving(tmp_path, ["numbers"], *flags, listen=["127.0.0.1:0", f"unix:{tmp_path}/node"]) as node:
        place = urlsplit(node.tcp)
        socket.create_connection((place.hostname, place.port)).close()  # as a load balancer does
        service = Service(node.tcp, tls_ca=None if node_has_it else files["ca"], wait=0.1 if node_has_it else 3600.0)
        with (
            pytest.raises(ServiceUnavailable, match=told),
            DataLoader[Any](definitions.numbers(), **OPTIONS, workers=service) as loader,
        ):
            list(loader)
        with DataLoader[Any](definitions.numbers(), **OPTIONS, workers=node.unix) as loader:  # it needs no TLS
            assert len(list(loader)) == 10
    log = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert logged in log
    assert log.count("was refused") >= 2  # a loader asks again before it gives up


@pytest.mark.parametrize(
    ("shown", "trusted", "told", "logged"),
    [
        (None, "ca", r"it asks for a certificate: set Service\(tls_cert=, tls_key=\)", "it has no certificate"),
        ("old", "ca", r"it refuses the certificate tls_cert='.*' \(certificate expired\)", "certificate has expired"),
        ("other", "ca", r"it refuses the certificate tls_cert='.*' \(unknown ca\)", "local issuer certificate"),
        ("ca", "other", "certificate verify failed", "it refuses this node's certificate: unknown ca"),
    ],
)
def test_a_certificate_is_refused(shown: str | None, trusted: str, told: str, logged: str, tmp_path: Path) -> None:
    """By a node that asks loaders for certificates, or by the loader."""
    made = {"ca": make_authority(tmp_path), "other": make_authority(tmp_path, "other")}
    made["old"] = make_authority(tmp_path, "old", days=-1)
    files = made["ca"]
    authorities = tmp_path / "authorities.pem"
    authorities.write_text(Path(files["ca"]).read_text() + Path(made["old"]["ca"]).read_text())
    flags = ["--tls-cert", files["node_cert"], "--tls-key", files["node_key"], "--tls-ca", str(authorities)]
    with serving(tmp_path, ["numbers"], *flags, listen=["127.0.0.1:0"]) as node:
        own = {} if shown is None else {name: made[shown][f"loader_{name[4:]}"] for name in ("tls_cert", "tls_key")}
        service = Service(node.tcp, tls_ca=made[trusted]["ca"], **own, wait=3600.0)
        with (
            pytest.raises(ServiceUnavailable, match=told),
            DataLoader[Any](definitions.numbers(), **OPTIONS, workers=service) as loader,
        ):
            list(loader)
    log = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert log.count("was refused") == 2
    assert logged in log
