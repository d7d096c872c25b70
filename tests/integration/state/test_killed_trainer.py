"""A training process is killed; another process resumes from the last state that the first printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.comparing import assert_same
from tests.helpers.running import Script, start_script
from tests.helpers.seeded_datasets import AllDraws
from tests.helpers.seeded_runs import epochs_of

OPTIONS = "batch_size=8, shuffle=True, seed=7"

SYNC = """
    import json
    from asyncloader import DataLoader
    from tests.helpers.seeded_datasets import AllDraws

    if __name__ == "__main__":
        with DataLoader(AllDraws(103), {options}) as loader:
            loader.load_state_dict(json.loads('''{state}'''))
            for epoch in range(3):
                for batch in loader:
                    print(json.dumps([batch.tolist(), loader.state_dict()]))
                    input()
"""

ASYNC = """
    import asyncio
    import json
    from asyncloader import AsyncDataLoader
    from tests.helpers.seeded_datasets import AllDraws

    async def main():
        async with AsyncDataLoader(AllDraws(103), {options}) as loader:
            loader.load_state_dict(json.loads('''{state}'''))
            for epoch in range(3):
                async for batch in loader:
                    print(json.dumps([batch.tolist(), loader.state_dict()]))
                    input()

    if __name__ == "__main__":
        asyncio.run(main())
"""


def steps(script: Script, count: int) -> tuple[list[Any], str]:
    """Let the script train for `count` batches; returns them, and the state that it printed with the last batch."""
    batches: list[Any] = []
    state: Any = None
    for step in range(count):
        if step:
            assert script.process.stdin is not None
            script.process.stdin.write("\n")
            script.process.stdin.flush()
        rows, state = json.loads(script.line())
        batches.append(torch.tensor(rows, dtype=torch.float64))
    return batches, json.dumps(state)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "second", "before", "after"),
    [(SYNC, ASYNC, "num_workers=2", "num_workers=1"), (ASYNC, SYNC, "num_workers=1", "num_workers=0")],
    ids=["sync to async", "async to sync"],
)
def test_killed_and_resumed(tmp_path: Path, first: str, second: str, before: str, after: str) -> None:
    """SIGKILL with batches in flight, in the second epoch; the next process gives its rest, and the third epoch."""
    expected = [
        batch for epoch in epochs_of("sync", AllDraws(103), 3, batch_size=8, shuffle=True, seed=7) for batch in epoch
    ]
    with start_script(tmp_path, first.format(options=f"{OPTIONS}, {before}", state="{}")) as script:
        got, state = steps(script, 17)
        script.process.kill()
        assert script.process.wait() == -9
    with start_script(tmp_path, second.format(options=f"{OPTIONS}, {after}", state=state)) as script:
        rest, _ = steps(script, len(expected) - 17)
        script.process.kill()
        script.process.wait()
    assert_same([*got, *rest], expected)
