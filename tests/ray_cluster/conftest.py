"""A Ray cluster of three machines with two CPUs each, for all tests here."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.helpers.running import ROOT

# pytest ends with an error where the first conftest.py that it reads skips its folder.
collect_ignore_glob = [] if find_spec("ray") else ["*"]


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """Replace the check around all other tests, which would find Ray's connections: only look for our threads."""
    yield
    gc.collect()
    assert [each.name for each in threading.enumerate() if each.name.startswith("asyncloader")] == []


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """The cluster; this process is its driver."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        for _ in range(2):
            made.add_node(num_cpus=2)
        ray.init(address=made.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        made.wait_for_nodes()
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
