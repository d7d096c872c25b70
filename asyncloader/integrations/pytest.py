"""A pytest plugin: the fixture `asyncloader_verify`, which fails a test with the findings about a loader.

It is named in a `conftest.py` (``pytest_plugins = ["asyncloader.integrations.pytest"]``). It is no entry point, because
pytest would rewrite the asserts of every module of a package that has one, in every run of any test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from asyncloader.verification.findings import Finding


@pytest.fixture
def asyncloader_verify() -> Callable[..., list[Finding]]:
    """Return a function that verifies a loader as `asyncloader verify` does, and fails the test if it finds a problem.

    It takes ``"module:make_loader"``, ``"file.py:make_loader"``, or a function at the top of a module, without
    arguments; ``seed`` (default 0) and ``seconds`` (default 60). It returns the findings.
    """

    def verified(target: str | Callable[[], Any], *, seed: int = 0, seconds: float = 60.0) -> list[Finding]:
        __tracebackhide__ = True
        from asyncloader.verification.findings import as_lines, has_problem
        from asyncloader.verification.verify import verify

        if not isinstance(target, str):
            name, module = getattr(target, "__qualname__", ""), sys.modules.get(getattr(target, "__module__", ""))
            # Not `inspect.getfile`: the code of a decorated function may be the decorator's.
            file = getattr(module, "__file__", None)
            if not name or "<" in name or file is None:  # a function in a function, a lambda, a partial; a notebook's
                raise ValueError(f"{name or target!r} is not at the top of a module, from which it is imported")
            target = f"{file}:{name}"
        findings = list(verify(target, seed=seed, seconds=seconds))
        if has_problem(findings):
            pytest.fail("\n".join(map(as_lines, findings)), pytrace=False)
        return findings

    return verified
