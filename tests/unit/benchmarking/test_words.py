"""The findings of a benchmark claim no more than its measurements show."""

from __future__ import annotations

from typing import Any

import pytest

from asyncloader.benchmarking import words
from asyncloader.benchmarking.comparison import Judgement, RateRatio
from asyncloader.benchmarking.outcome import Contender
from asyncloader.benchmarking.search_settings import Setting
from tests.unit.benchmarking.outcomes import outcome

FASTER = RateRatio(2.5, 2.4, 2.6, 5)
SAME = RateRatio(1.0, 0.98, 1.02, 5)
UNSURE = RateRatio(1.2, 0.9, 1.6, 5)


@pytest.mark.parametrize(
    ("best", "found", "judgement", "state", "says", "advises"),
    [
        (Setting(8), FASTER, "faster", "problem", "2.50 times as fast as yours, at least 2.40", "set num_workers=8"),
        (Setting(1), SAME, "same", "note", "as fast as yours, within 2.0%", "set num_workers=1"),
        (Setting(8), SAME, "same", "ok", "yours; the best other setting was not faster", ""),
        (Setting(8), UNSURE, "unsure", "note", "0.90 to 1.60 times is possible", "give more --seconds"),
    ],
)
def test_the_answer(best: Setting, found: RateRatio, judgement: Judgement, state: str, says: str, advises: str) -> None:
    """The answer is a problem only if a gain is sure; it has the ratio's bounds, and the figures of the rounds."""
    answer = words.setting(*outcome(best, found, judgement))
    assert (answer.name, answer.state, answer.advice) == ("setting", state, advises)
    assert says in answer.text
    assert answer.figures["batches_per_sec"] == pytest.approx(40.2 * found.ratio)
    assert answer.figures["change"] == best.change_from(Setting(2))


@pytest.mark.parametrize(
    ("best", "facts", "caution"),
    [
        (Setting(2, threads=True), {}, "the dataset must be safe to call from several threads"),
        (Setting(8), {"iterable": True, "assigned": True}, "the samples come in another order"),
    ],
)
def test_the_advice_has_cautions(best: Setting, facts: dict[str, Any], caution: str) -> None:
    """The advice warns if the dataset must be safe in threads, or the order of the samples changes."""
    assert words.setting(*outcome(best, FASTER, "faster", **facts)).advice.endswith(f"; {caution}")


def test_torchs_loader_is_replaced_by_ours() -> None:
    """The advice names asyncloader's class, and the options to change, if any."""
    mine = {"ours": False, "name": "torch.DataLoader"}
    answer = words.setting(*outcome(Setting(8), FASTER, "faster", **mine))
    assert answer.advice == "use asyncloader.DataLoader with num_workers=8"
    assert answer.text.startswith("asyncloader.DataLoader, num_workers=8: 2.50 times")
    assert words.setting(*outcome(Setting(2), FASTER, "faster", **mine)).advice == "use asyncloader.DataLoader"


def test_yours_is_the_best() -> None:
    """The answer has the number of the other settings; if none was measured, it is only a note."""
    made, _ = outcome(Setting(8), SAME, "same")
    assert words.setting(made, None).text == "yours: none of 2 other settings was more than 5% faster"
    made.runs = [each for each in made.runs if each.phase != "search"]
    assert words.setting(made, None).state == "note"


def test_the_measurements() -> None:
    """The rate is that of the rounds, not of the search; failed settings and a slow first run are mentioned."""
    made, _ = outcome(Setting(8), FASTER, "faster")
    found = {each.name: each for each in words.describe(made)}
    assert found["rate"].figures["batches_per_sec"] == pytest.approx(40.2)
    assert found["rate"].text.startswith(
        "40.2 batches/s (643 samples/s), a batch each 24.9 ms: median of 10 runs of 1 s"
    )
    assert "25% of the later runs' rate" in found["first run"].text
    assert found["stages"].text == "of a batch, on average: fetch 25 ms, collate 300 us"
    assert "differences below 2.0% are noise" in found["noise"].text
    assert found["search"].text.startswith("2 other settings in 4 runs; fastest first: num_workers=8: 100 batches/s")
    assert "1 of them failed" in found["search"].text
    assert found["search"].state == "ok"
    made.left_out = 3
    assert words.search(made).state == "note"


@pytest.mark.parametrize(("low", "state"), [(0.99, "ok"), (0.7, "note")])
def test_a_busy_machine_is_mentioned(low: float, state: str) -> None:
    """Noise of a fifth or more makes the finding a note."""
    assert words.noise(RateRatio(0.99, low, 1.0, 3)).state == state


@pytest.mark.parametrize(
    ("ours", "judgement", "state"), [(True, "faster", "note"), (True, "slower", "ok"), (False, "slower", "note")]
)
def test_torch_is_faster(ours: bool, judgement: Judgement, state: str) -> None:
    """A faster loader of torch is a note, whether the user's loader is torch's or asyncloader's."""
    made, compared = outcome(Setting(2), FASTER, judgement, ours=ours)
    other = compared._replace(contender=Contender("torch" if ours else "asyncloader", Setting(2)))
    assert words.same_options(made, other).state == state
