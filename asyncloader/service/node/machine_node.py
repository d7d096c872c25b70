"""The node that `workers="shared"` starts:
`python -m asyncloader.service.node.machine_node MODULE:DEFINITION DESCRIPTOR`.

Data path: that of `server.py`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence

from asyncloader.cpus import usable_cpus
from asyncloader.service.definition import load_definition
from asyncloader.service.node.admission import Served
from asyncloader.service.node.node_log import set_up_log
from asyncloader.service.node.server import Node
from asyncloader.workers.worker import serve_async

__all__: list[str] = []

_FIRST_S = 60.0  # for the first loader to connect


def _main(argv: Sequence[str]) -> None:
    target, descriptor = argv
    set_up_log(logging.WARNING)
    served, problem = [], ""
    try:
        served = [Served(target, load_definition(target), open=True)]
    except (Exception, SystemExit) as error:
        # The node listens although it serves nothing: no other place can report the user's error to the loaders.
        problem = f"its node cannot import {target}: {type(error).__name__}: {error}"
    serve_async(lambda: _serve(served, problem, socket.socket(fileno=int(descriptor))))


async def _serve(served: Sequence[Served], problem: str, listener: socket.socket) -> None:
    from asyncloader.live.node_view import NodeView  # late: it imports the node

    node = Node(served, usable_cpus(), problem=problem)
    view = NodeView(node)
    try:
        if os.environ.get("ASYNCLOADER_TOP") == "1":  # as its loaders
            await view.open()
            view.addresses = ("this machine",)
        node.listen_at(listener)
        await node.left(_FIRST_S)
    finally:
        await view.close()
        await node.close()


if __name__ == "__main__":
    _main(sys.argv[1:])
