"""Talks to datapipes in other processes by requests and responses: for reading services that users wrote themselves.

Data path: datapipe -> [communication: loop in a process, response queue] -> QueueWrapper -> graph.

Names as in `torchdata.dataloader2.communication`. `MultiProcessingReadingService` does not use it: its items cross
through shared memory. Each datapipe has a request queue and a response queue; one request is under way at a time.
"""

from __future__ import annotations

from asyncloader.dataloader2.communication import eventloop, iter, map, messages, protocol, queue  # noqa: A004

__all__ = ["eventloop", "iter", "map", "messages", "protocol", "queue"]
