"""Ctrl-C while a batch is being delivered: whoever goes on gets it, and all others, once and in order."""

from __future__ import annotations

import dis
import sys
from types import CodeType, FrameType
from typing import Any

import torch

from asyncloader import DataLoader
from asyncloader.consumer import Consumer
from asyncloader.sync_iterator import WorkerIterator
from tests.integration.datasets import Numbers

WATCHED = [WorkerIterator._next_data, Consumer.deliver, Consumer._delivered]


class Interruption:
    """Raises KeyboardInterrupt at one instruction of a call: the `at`-th of those in the watched functions.

    Not behind the instruction with which the batch is given up: from there on nothing is called, and Python looks for
    signals only after calls, at jumps back, and where a function begins.
    """

    def __init__(self, at: int) -> None:
        self.left = at
        self.codes: set[CodeType] = {function.__code__ for function in WATCHED}
        self.deletes = {
            each.offset for each in dis.get_instructions(WorkerIterator._next_data) if each.opname == "DELETE_SUBSCR"
        }

    def __enter__(self) -> None:
        sys.settrace(self.called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code not in self.codes:
            return None
        frame.f_trace_opcodes = True
        return self.traced

    def traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            if frame.f_code is WorkerIterator._next_data.__code__ and frame.f_lasti in self.deletes:
                sys.settrace(None)
                return None
        return self.traced


def test_from_giving_a_batch_up_on_nothing_is_called() -> None:
    """What `Interruption` rests on."""
    instructions = list(dis.get_instructions(WorkerIterator._next_data))
    last = max(place for place, each in enumerate(instructions) if each.opname == "DELETE_SUBSCR")
    after = [each.opname for each in instructions[last:]]
    until = after[: after.index("RETURN_VALUE") + 1]
    assert not [name for name in until if "CALL" in name]


def test_ctrl_c_at_every_instruction() -> None:
    """At each one in turn, in another batch's delivery. No slot stays leased."""
    with DataLoader[Any](Numbers(1000), num_workers=1, prefetch_factor=4, persistent_workers=True) as loader:
        batches: Any = iter(loader)
        got: list[torch.Tensor] = [next(batches)]
        struck = at = 0
        while struck == at:
            at += 1
            try:
                with Interruption(at):
                    got.append(next(batches).clone())
            except KeyboardInterrupt:
                struck += 1
        assert struck > 50
        got += [batch.clone() for batch in batches]
        assert [int(batch[0, 0]) for batch in got] == [int(Numbers(1000)[index][0]) for index in range(1000)]
        del got
        (ring,) = (keeper.ring for keeper in batches._pool.rings)
        assert ring.idle
