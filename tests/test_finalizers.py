"""Finalizers signal and never wait: every `__del__`, weak reference's callback and hook at exit or at a fork is
searched, with all functions of the package that it calls.

Finalizers run in any thread, which may hold a lock that the awaited thread needs; and once the interpreter is
finalizing no daemon thread ever runs again (from Python 3.13 on), so that a wait for such a thread never ends.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest

from docs.house import MODULES

WAITS = {"join", "wait", "wait_for", "result", "acquire", "run", "get", "sleep", "settle", "select", "poll", "recv"}
"""Methods and functions that wait; `get` only of a queue."""

BOUNDED = {
    # Waits of hooks at exit: these run while daemon threads still do.
    "join_all: thread.join": "until a deadline that all threads have in common",
    "_leave_all: thread.join": "ditto, of the threads that tell the other ranks",
    "Bridge.wait_for_releases: thread.join": "its argument",
    "FetchPlace.close: self._thread.join": "its argument, which at exit is a deadline that all have in common",
    "JobThreads.join: thread.join": "its argument",
    "_Table.settle: self._lock.acquire": "not at all: it does not block",
    "_Table.end: self.settle": "ditto",
    "_settle: time.sleep": "a twentieth of a second",
    # Processes end by themselves once they are asked to, whatever the threads of this process do.
    "hang_up: poll.poll": "five seconds",
    "hang_up: select.poll": "not at all: it makes the object",
    # Reached from a finalizer only where no thread can be started any more, and then no other thread uses the pool.
    "WorkerPool.stop: with self._stop_lock": "five seconds",
    "WorkerPool.stop: with self._making": "as long as a line of code takes",
    "LocalWorkers.end: shutdown.run": "eight seconds",
    "LocalWorkers._let_go: with self._lock": "not at all: no other thread uses it",
    "ThreadWorkers._end: worker.join": "a deadline that all threads have in common",
}


class Function(NamedTuple):
    module: str
    owner: str  # its class; empty for a plain function
    node: ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.node.name}" if self.owner else self.node.name


@cache
def parsed() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


@cache
def functions() -> dict[str, list[Function]]:
    """Return all functions of the package, nested ones too, by their plain names. A class stands for its `__init__`."""
    found: dict[str, list[Function]] = {}

    def visit(module: str, owner: str, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                function = Function(module, owner, child)
                found.setdefault(child.name, []).append(function)
                if child.name == "__init__" and owner:
                    found.setdefault(owner, []).append(function)
            visit(module, child.name if isinstance(child, ast.ClassDef) else owner, child)

    for module, tree in parsed().items():
        visit(module, "", tree)
    return found


@cache
def families() -> dict[str, set[str]]:
    """Return for each class the names of itself, its bases and the classes derived from it."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in parsed().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    above = {name: {name} for name in bases}
    for _ in range(5):
        for every in above.values():
            every |= {up for base in every & bases.keys() for up in bases[base]}
    return {name: above[name] | {other for other in above if name in above[other]} for name in above}


@cache
def types_of_names() -> dict[tuple[str, str], set[str]]:
    """Return the package's classes with which a variable, argument or attribute of this name is annotated, or from
    which it is made, by module and name.
    """
    found: dict[tuple[str, str], set[str]] = {}

    def note(module: str, target: ast.AST, kind: ast.AST | None) -> None:
        name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
        if kind is not None:
            words = {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)}
            found.setdefault((module, name.lstrip("_")), set()).update(words & families().keys())

    for module, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign):
                note(module, node.target, node.annotation)
            elif isinstance(node, ast.arg):
                note(module, ast.Name(node.arg), node.annotation)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                note(module, node.targets[0], node.value.func)
    return found


def types_of(module: str, name: str) -> set[str]:
    """Return these classes for a name in a module; if that module has none, those of any module."""
    here = types_of_names().get((module, name))
    if here:
        return here
    return {kind for (_, other), kinds in types_of_names().items() if other == name for kind in kinds}


@cache
def calls(function: Function) -> list[Function]:
    """Return the package's functions that it calls, except coroutine functions: those run elsewhere."""
    found = [each for node in own_nodes(function) if isinstance(node, ast.Call) for each in called(function, node)]
    return [each for each in found if not isinstance(each.node, ast.AsyncFunctionDef)]


def called(function: Function, call: ast.Call) -> Iterator[Function]:
    """Give the package's functions that this call may reach, without functions that are passed for a later call."""
    target = call.func
    if isinstance(target, ast.Name):
        every = [found for found in functions().get(target.id, ()) if not found.owner or found.node.name == "__init__"]
        yield from [found for found in every if found.module == function.module] or every
    if not isinstance(target, ast.Attribute):
        return
    receiver = target.value
    if isinstance(receiver, ast.Name) and receiver.id == "self":
        owners = families().get(function.owner, {function.owner})
    elif isinstance(receiver, ast.Call):  # super()
        owners = families().get(function.owner, set())
    else:
        name = receiver.id if isinstance(receiver, ast.Name) else getattr(receiver, "attr", "")
        owners = {kin for kind in types_of(function.module, name.lstrip("_")) for kin in families()[kind]}
        for found in functions().get(target.attr, ()):
            if not found.owner and found.module.endswith(f".{name}"):
                yield found
    yield from (found for found in functions().get(target.attr, ()) if found.owner in owners)


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """Give its nodes, without those of functions that are only defined in it."""
    todo: list[ast.AST] = list(function.node.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo.extend(ast.iter_child_nodes(node))


@cache
def waits(function: Function) -> frozenset[str]:
    """Return the places in it that wait."""
    return frozenset(_waits(function))


def _waits(function: Function) -> Iterator[str]:
    for node in own_nodes(function):
        if isinstance(node, ast.With):
            for item in node.items:
                text = ast.unparse(item.context_expr)
                if "lock" in text.lower() or text in {"self._making", "self._locked()"}:
                    yield f"{function.name}: with {text}"
        if isinstance(node, ast.Await):
            yield f"{function.name}: {ast.unparse(node)}"
        if not isinstance(node, ast.Call):
            continue
        target, text = node.func, ast.unparse(node.func)
        name = target.attr if isinstance(target, ast.Attribute) else text
        of_text = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Constant)
        of_mapping = name == "get" and bool(node.args)
        if name in WAITS and not of_text and not of_mapping:
            yield f"{function.name}: {text}"
        if name == "shutdown" and "executor" in text:
            yield f"{function.name}: {text}"
        if name == "destroy_process_group":
            yield f"{function.name}: {text}"


def _named(node: ast.AST, module: str) -> list[Function]:
    """Return the functions of this name, or the lambda, that a callback is."""
    if isinstance(node, ast.Lambda):
        body = ast.FunctionDef("<lambda>", node.args, [ast.Expr(node.body)], [], lineno=node.lineno)
        return [Function(module, "", body)]
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return [found for found in functions().get(name, ()) if found.module == module]


def finalizers() -> list[Function]:
    """Return the functions that Python calls at the end of an object or of the process, or around a fork."""
    found = list(functions()["__del__"])
    for module, tree in parsed().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node.func)
            if text in {"weakref.finalize", "weakref.ref"} and len(node.args) > 1:
                found += _named(node.args[1], module)
            elif text in {"at_exit", "before_fork", "in_forked_child"}:
                found += _named(node.args[0], module)
    return found


def reached(root: Function) -> list[Function]:
    """Return this function, and all functions of the package that it calls, directly or not."""
    seen: set[Function] = set()
    todo = [root]
    while todo:
        function = todo.pop()
        if function not in seen:
            seen.add(function)
            todo += calls(function)
    return list(seen)


@pytest.mark.thorough
@pytest.mark.parametrize("root", finalizers(), ids=lambda root: f"{root.module}:{root.name}")
def test_a_finalizer_waits_for_nothing(root: Function) -> None:
    """Neither it nor the functions that it calls join a thread, take a lock, or wait for another thread's work."""
    found = {place for function in reached(root) for place in waits(function)}
    assert found <= BOUNDED.keys()


@pytest.mark.thorough
@pytest.mark.parametrize("root", functions()["__del__"], ids=lambda root: f"{root.module}:{root.name}")
def test_nothing_of_ours_runs_while_the_interpreter_is_finalizing(root: Function) -> None:
    """By then modules may be cleared, and threads have ended: a finalizer that calls ours checks `exiting()` first."""
    assert len(reached(root)) == 1 or "exiting()" in ast.unparse(root.node)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("_shutdown_workers", "Bridge.release: thread.join"),
        ("_shutdown_workers", "Stage.close: self._thread.join"),
        ("_shutdown_workers", "Call.join: self._answers.get"),
        ("make_group", "destroy_unused: thread.join"),
        ("_destroy", "_destroy: torch.distributed.destroy_process_group"),
    ],
)
def test_the_walk_finds_what_waits(name: str, place: str) -> None:
    """The search follows calls: waits of ordinary code are found from the functions in which it begins."""
    assert any(place in waits(found) for root in functions()[name] for found in reached(root))
