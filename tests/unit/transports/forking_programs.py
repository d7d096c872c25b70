"""The beginning of test programs that fork; run by `python -c`."""

from __future__ import annotations

FORKED = """
import os

def forked(body):
    pid = os.fork()
    if not pid:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
"""Defines ``forked(body)``: calls `body` in a child and waits for the child's exit; `body` must not raise."""
