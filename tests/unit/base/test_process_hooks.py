"""Hooks at forks and at exit: once each, in order, and at exit only in the process that registered them."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.running import run_script

SCRIPT = """
import os, sys
from asyncloader.base.process_hooks import at_exit, before_fork, in_forked_child

def say(text):
    os.write(1, f"{text} ".encode())

def one(): say("one")
def two(): say("two")

for register in (before_fork, in_forked_child, at_exit):
    for hook in (one, two, one):
        register(hook)
"""


def test_each_hook_runs_once_in_the_order_of_registration(tmp_path: Path) -> None:
    """Before a fork and at exit the newest runs first, as in the interpreter; in the child the oldest runs first."""
    script = """
child = os.fork()
if child:
    os.waitpid(child, 0)
    say("exit:")
else:
    say("child ends")
    os._exit(0)
"""
    assert run_script(tmp_path, SCRIPT + script).stdout.strip() == "two one one two child ends exit: two one"


def test_exit_hooks_of_a_parent_do_not_run_in_its_child(tmp_path: Path) -> None:
    """Only a hook that the child registers itself runs at its exit."""
    script = """
child = os.fork()
if child:
    os.waitpid(child, 0)
    os._exit(0)
at_exit(one)
say("exit:")
"""
    assert run_script(tmp_path, SCRIPT + script).stdout.strip() == "two one one two exit: one"
