"""Drawn configurations, faults and resumes: the batches are those of local workers, each exactly once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncloader import DataLoader
from tests.helpers.comparing import assert_same
from tests.service import definitions
from tests.service.proxy import Proxy, proxied
from tests.service.serving import NodeProcess, serving

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

OPTIONS = st.fixed_dictionaries(
    {
        "batch_size": st.sampled_from([None, 1, 3, 8]),
        "seed": st.integers(0, 3),
        "num_workers": st.integers(1, 3),
        "prefetch_factor": st.integers(1, 3),
        "persistent_workers": st.booleans(),
        "in_order": st.just(True),
    }
)
MAP = st.fixed_dictionaries(
    {"shuffle": st.booleans(), "drop_last": st.booleans(), "rank": st.integers(0, 1), "world_size": st.just(2)}
)
FAULTS = ["none", "kill", "reset", "resume"]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    names = ["numbers", "awaited", "stream"]
    opened = [part for name in names for part in ("--open", name)]
    with serving(tmp_path_factory.mktemp("node"), names, *opened) as made:
        yield made


@settings(deadline=None)
@given(
    name=st.sampled_from(["numbers", "awaited", "stream"]),
    length=st.sampled_from([7, 40]),
    options=OPTIONS,
    of_maps=MAP,
    fault=st.sampled_from(FAULTS),
    step=st.integers(0, 12),
    unix=st.booleans(),
)
def test_any_epoch(
    node: NodeProcess,
    name: str,
    length: int,
    options: dict[str, Any],
    of_maps: dict[str, Any],
    fault: str,
    step: int,
    unix: bool,
) -> None:
    """A worker is killed, connections are reset, or the epoch is resumed by another loader, at any step."""
    defined = getattr(definitions, name)(n=length)
    if options["batch_size"] is None:
        of_maps = {**of_maps, "drop_last": False}
    options = options if name == "stream" else {**options, **of_maps}
    with DataLoader[Any](defined, **options) as local:
        expected = list(local)
    with proxied(node.tcp) as proxy:
        got = _read(defined, options, node.unix if unix else proxy.address, proxy, fault, step)
    assert_same(got, expected)


def _read(defined: Any, options: dict[str, Any], workers: str, proxy: Proxy, fault: str, step: int) -> list[Any]:
    with DataLoader[Any](defined, **options, workers=workers) as loader:
        batches: Any = iter(loader)
        got = list(islice(batches, step))
        if fault == "resume" and len(got) == step:
            state = loader.state_dict()
            with DataLoader[Any](defined, **options, workers=proxy.address) as other:
                other.load_state_dict(state)
                return [*got, *other]
        if fault == "reset":
            proxy.reset()
        elif fault == "kill" and len(got) == step:
            with suppress(ProcessLookupError):
                os.kill(batches._pool.processes[0].pid, signal.SIGKILL)
        return [*got, *batches]
