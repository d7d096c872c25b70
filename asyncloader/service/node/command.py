"""`asyncloader serve`: runs a node.

    asyncloader serve data:train --arg root=/data --listen 127.0.0.1:7070 --workers 8

Every flag can also come from the environment (``ASYNCLOADER_LISTEN``; lists with commas), and a flag goes before it.
The first line on standard output is JSON and says where the node listens; it is printed when the node is ready. The log
goes to standard error.
"""

from __future__ import annotations

import argparse
from typing import Any


def add_serve(commands: Any) -> None:
    """Add the command and its flags to a parser's commands."""
    serve = commands.add_parser(
        "serve",
        help="run workers for loaders elsewhere",
        argument_default=None,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = serve.add_argument
    add("target", nargs="*", metavar="MODULE:DEFINITION", help="what to serve")
    add("--arg", action="append", metavar="NAME=VALUE", help="an argument of every definition that takes it")
    add("--open", action="append", metavar="NAME", help="let loaders give this definition's arguments")
    add("--listen", action="append", metavar="ADDRESS", help="host:port or unix:/path; default 127.0.0.1:7070")
    add("--workers", type=int, metavar="N", help="processes for each definition; default: one for each CPU")
    add("--token-file", metavar="FILE", help="loaders must have the token in this file; or ASYNCLOADER_TOKEN")
    add("--tls-cert", metavar="FILE", help="this node's certificate: connections are TLS")
    add("--tls-key", metavar="FILE", help="its key")
    add("--tls-ca", metavar="FILE", help="loaders must show a certificate that these have signed")
    add("--metrics", metavar="ADDRESS", help="host:port of /metrics, /healthz and /readyz")
    add("--config", metavar="FILE", help=argparse.SUPPRESS)
