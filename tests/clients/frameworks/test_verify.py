"""`asyncloader verify` of sound loaders over code of other projects: no problem is found in any."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncloader.verification.findings import Finding
from asyncloader.verification.server import Interpreter
from asyncloader.verification.verify import Verification
from tests.clients.frameworks import verified_loaders

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

LOADERS = {
    "tensors": "torch",
    "weighted": "torch",
    "distributed": "torch",
    "hf_map": "datasets",
    "hf_stream": "datasets",
    "web_shards": "webdataset",
    "torchdata_loader": "torchdata",
    "lightning_module": "lightning",
    "by_length": "asyncloader",
}

Verify = Callable[[str], list[Finding]]


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verify]:
    """Verifies a loader of `verified_loaders`, and returns the findings."""
    folder = tmp_path_factory.mktemp("verified")
    target = f"{verified_loaders.__file__}:chosen"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERIFIED_DATA", str(folder))
        patch.setenv("HF_DATASETS_CACHE", str(folder / "hf"))
        with Interpreter(target, 1) as here, Interpreter(target, 2) as elsewhere:

            def verify_one(name: str) -> list[Finding]:
                (folder / "choice").write_text(name)
                return [*Verification(here, elsewhere, 0, 120.0).findings()]

            yield verify_one


@pytest.mark.parametrize("name", LOADERS)
def test_no_problem_is_found(name: str, verified: Verify) -> None:
    """All disturbed runs that are made give the same bytes, or are not compared, with the reason."""
    if importlib.util.find_spec(LOADERS[name]) is None:
        pytest.skip(f"{LOADERS[name]} is not installed: make test-integrations")
    found = verified(name)
    problems = [each for each in found if each.state == "problem"]
    assert not problems, found
    assert next(each for each in found if each.name == "undisturbed run").figures["batches"] > 1, found


def test_every_loader_is_verified() -> None:
    """The list has all of them."""
    path = Path(verified_loaders.__file__)
    made = [line.split("(")[0].removeprefix("def ") for line in path.read_text().splitlines() if line[:4] == "def "]
    assert {each for each in made if not each.startswith("_")} == {*LOADERS, "chosen"}
