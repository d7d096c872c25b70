"""Checks a loader's request against the definitions that a node serves. Pure."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncloader.base.peer_text import line_of
from asyncloader.service.protocol.handshake import PROTOCOL, Hello

if TYPE_CHECKING:
    from asyncloader.service.protocol.definition import Definition


class Refused(Exception):
    """A loader is not served.

    Args:
        text: the reason, which the loader receives.
        for_now: whether it may be served later.
    """

    def __init__(self, text: str, *, for_now: bool = False) -> None:
        super().__init__(text)
        self.for_now = for_now


@dataclass
class Served:
    """A definition that is served.

    Attributes:
        target: its place, as ``module:name``.
        definition: the definition.
        arguments: of its calls; defaults, if loaders may choose.
        open: whether loaders choose its arguments.
    """

    target: str
    definition: Definition
    arguments: Mapping[str, Any] = field(default_factory=dict)
    open: bool = False


def find_served(everything: Mapping[str, Served], hello: Hello) -> tuple[Served, Mapping[str, Any]]:
    """Return the definition that a loader asks for, and the arguments of its call.

    Raises:
        Refused: it is not served, or not in this version or with these arguments.
    """
    if hello.protocol != PROTOCOL:
        raise Refused(f"the loader speaks protocol {hello.protocol}, and this node {PROTOCOL}")
    mine = Hello.versions()
    # Not only the protocol's version: random numbers may differ between two versions, and with them the batches.
    if (hello.version, hello.torch) != mine:
        theirs = f"asyncloader {line_of(hello.version)} and torch {line_of(hello.torch)}"
        raise Refused(f"the loader has {theirs}, and this node asyncloader {mine[0]} and torch {mine[1]}")
    served = everything.get(hello.name)
    if served is None:
        raise Refused(f"{hello.name!r:.60} is not served here; {', '.join(sorted(everything))} is")
    try:
        served.definition.check(line_of(hello.fingerprint), "at the loader")
    except ValueError as error:
        raise Refused(str(error)) from None
    try:
        given = json.loads(hello.arguments)
    except (ValueError, RecursionError):
        given = None
    if type(given) is not dict:
        raise Refused(f"the arguments of {hello.name} are no JSON object")
    if served.open:
        return served, served.definition.convert({**served.arguments, **given})
    wanted = served.definition.convert(given)
    if any(name not in served.arguments or served.arguments[name] != value for name, value in wanted.items()):
        raise Refused(
            f"{hello.name} is served with {as_text(served.arguments)}, and the loader asks for "
            f"{as_text(wanted)}. A node that is started with --open {hello.name} lets loaders choose"
        )
    return served, served.arguments


def as_text(arguments: Mapping[str, Any]) -> str:
    """Format a definition's arguments for a log line or an error."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no arguments"


def tls_refusal(error: Exception) -> str:
    """Return why one side refuses the other's certificate; empty if the connection ended for another reason."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid here: {error.verify_message}"
    reason = (error.reason or "") if isinstance(error, ssl.SSLError) else ""
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no certificate: set Service(tls_cert=, tls_key=)"
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"):
        return "it does not speak TLS, and this node does: set Service(tls_ca=)"
    why = reason.partition("ALERT_")[2].replace("_", " ").lower()
    return why and f"it refuses this node's certificate: {why}"


def dataset_key(target: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Return a key for the dataset of a definition with these arguments."""
    # `default`, because a `Path` is no JSON: `convert` makes one of a text where the annotation says so.
    return target, json.dumps(arguments, sort_keys=True, default=str)
