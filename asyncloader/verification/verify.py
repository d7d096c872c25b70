"""Verifies a loader: compares disturbed runs with an undisturbed one, and names the first batch and field that differ.

Data path: target -> [verify: interpreters, disturbances, verdict] -> findings. User code runs in child processes only.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from asyncloader.verification import verdict
from asyncloader.verification.causes import Causes, search
from asyncloader.verification.disturbances import Disturbance, LoaderFacts, disturbances
from asyncloader.verification.findings import Finding
from asyncloader.verification.runs import Batch, RunJob, RunResult, look, run
from asyncloader.verification.server import Interpreter, ServerEnded
from asyncloader.verification.user_code import UserFailure

MOST_BATCHES = 24
_MOST_PROBLEMS = 3  # of disturbed runs, before the rest is left out
_MOST_S = 86_400
_LEAST_CAP_S = 30.0  # a busy machine takes its time
_ALWAYS = 4  # disturbed runs that are made even when the time is up: of different kinds, with forked workers
_SEARCHED = 3  # batches that are read to see which handles samples use
_HASH_SEEDS = 1, 2


# Undisturbed runs that are made again: where, why their batches may differ, what to do. The first is made by the same
# process, the others by one with another hash seed, the last with other states of its generators.
_REPEATS = (
    (
        "in a second run",
        "it depends on the clock, on entropy, or on a generator without a seed",
        f"leave the clock out of samples; {verdict.OWN_GENERATOR}",
    ),
    (
        "in another process",
        "it depends on the order of a set, on hash() of a text, or on what the module drew or asked at its import",
        "sort a set before its order counts, take zlib.crc32() for hash(), and give generators a seed",
    ),
    (
        "where random, numpy.random and torch are in other states",
        "it draws from one of them",
        verdict.OWN_GENERATOR,
    ),
)


def verify(target: str, *, seed: int = 0, seconds: float = 60.0) -> Iterator[Finding]:
    """Yield the findings, as they are made.

    Args:
        target: ``"module:make_loader"`` or ``"file.py:make_loader"``: a function without arguments that returns a
            loader, torch's or asyncloader's. It may be async.
        seed: of the draws of disturbed runs.
        seconds: after these no further run is begun, but for four disturbed ones that are always made. A run that hangs
            is ended.

    Raises:
        ValueError: the function does not exist, it makes no loader, or `seconds` is not above 0, or is more than a day.
        UnsupportedPlatform: processes cannot be forked here.
    """
    if not 0 < seconds <= _MOST_S:
        raise ValueError(f"seconds should be above 0 and at most {_MOST_S} (a day), but got {seconds!r}")
    if "fork" not in multiprocessing.get_all_start_methods():
        from asyncloader.errors import UnsupportedPlatform

        raise UnsupportedPlatform(f"asyncloader verify forks the processes of its runs, which {sys.platform} cannot do")
    one, other = _HASH_SEEDS
    with Interpreter(target, one) as here, Interpreter(target, other) as elsewhere:
        yield from Verification(here, elsewhere, seed, seconds).findings()


class Verification:
    """One verification. Interpreters may serve several, one after the other.

    Args:
        here: the interpreter of all runs but those in `elsewhere`, which has another hash seed.
        elsewhere: the other.
        seed: of the draws.
        seconds: see `verify`.
    """

    def __init__(self, here: Interpreter, elsewhere: Interpreter, seed: int, seconds: float) -> None:
        self._here, self._elsewhere, self._seed = here, elsewhere, seed
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._cap = max(seconds, _LEAST_CAP_S)  # for one run
        self._base: dict[str, Any] = {}  # of an undisturbed run
        self._expected: list[Batch] = []
        self._ends = False  # whether the epoch ends with the last of these; then a run reads on, for one more
        self._depends = False  # whether the batches depend on generators of the process that nothing seeds

    def findings(self) -> Iterator[Finding]:
        """Yield the findings."""
        try:
            for interpreter in (self._here, self._elsewhere):
                if (failure := interpreter.ready(self._cap)) is not None:
                    yield verdict.broken("import", failure, "importing the module")
                    return
            yield from self._verified()
        except ServerEnded as error:
            advice = "its code has ended the process, or holds it up: a module should only define functions"
            yield Finding("process", "problem", str(error), advice)

    def _run(self, *, elsewhere: bool = False, **job: Any) -> RunResult:
        # The number of batches bounds a run that is compared: it is not to be cut off while its workers are started.
        seconds = self._cap / 2 if self._expected else max(self._seconds / 6, 5.0)
        most = (len(self._expected) or MOST_BATCHES) + self._ends
        values: dict[str, Any] = {"batches": most, "seconds": seconds, **job}
        answer = (self._elsewhere if elsewhere else self._here).ask(partial(run, RunJob(**values)), self._cap)
        return RunResult(failure=answer) if isinstance(answer, UserFailure) else answer

    # ------------------------------------------------------------------------------------ the undisturbed run

    def _verified(self) -> Iterator[Finding]:
        facts = self._here.ask(look, self._cap)
        if isinstance(facts, UserFailure):
            yield verdict.broken("make_loader", facts, "making the loader")
            return
        self._facts: LoaderFacts = facts
        mode = "seed= is set" if facts.seeded else "verified as with seed=0"
        kind = "iterable" if facts.iterable else "map"
        text = f"{facts.name}, {kind} dataset, num_workers={facts.workers}; {mode}; drawn by --seed {self._seed}"
        yield Finding("loader", "ok", text, figures={**facts._asdict(), "seed": self._seed})
        workers = facts.workers if facts.iterable and facts.workers > 1 else 0
        self._base = {"workers": workers, "method": ("threads" if facts.threads else "fork") if workers else None}
        # The batch behind the last that is compared says only that the epoch goes on.
        result = self._run(**self._base, batches=MOST_BATCHES + 1)
        if result.failure is not None:
            yield verdict.broken("undisturbed run", result.failure, "the undisturbed run")
            return
        self._expected, self._ends = result.batches[:MOST_BATCHES], result.ended
        number = len(self._expected)
        if not number:
            yield Finding("undisturbed run", "problem", "the loader has no batch", "give it a dataset with samples")
            return
        yield Finding("undisturbed run", "ok", f"{number} batches", figures={"batches": number})
        yield from self._noticed(result)
        yield from self._compared()

    def _noticed(self, result: RunResult) -> Iterator[Finding]:
        if result.edited is not None:
            text = f"batch {result.edited} is changed after it was delivered, while the next batch is made"
            advice = "return new tensors from collate_fn and from samples, not a buffer that is used again"
            yield Finding("aliased batches", "problem", text, advice, {"batch": result.edited})
        first, workers = self._expected[:2], self._base["workers"]
        if workers > 1 and len(first) == 2 and first[0] == first[1]:
            alone = self._run(workers=0).batches
            if verdict.difference(alone[:1], alone[1:2]) is not None:
                text = f"each of {workers} workers gives the same samples"
                advice = "give each worker a part, by torch.utils.data.get_worker_info()"
                yield Finding("duplicates", "problem", text, advice)

    def _compared(self) -> Iterator[Finding]:
        """Make the other runs, as far as the findings leave something to compare."""
        repeated, comparable = self._repeated()
        same = "the same bytes with another hash seed and state of generators"
        yield repeated or Finding("repeated runs", "ok", same)
        facts, causes = self._facts, self._search(_SEARCHED)
        processes = facts.workers > 0 and not facts.threads
        for kind, line in causes.handles.items():
            yield verdict.handle(kind, line, forks=processes and facts.method == "fork")
        if causes.unpicklable is not None and not facts.threads:
            needed = processes and facts.method != "fork"
            yield verdict.unpicklable(causes.unpicklable, needed=needed, method=facts.method)
        if comparable and not causes.handles:
            yield from self._disturbed(["fork"] if causes.unpicklable else ["fork", "spawn", "forkserver"])
        else:
            why = "forked workers share what is named above" if comparable else "two undisturbed runs differ already"
            yield Finding("disturbed runs", "note", f"left out, as {why}", "mend what is above first")

    def _search(self, batches: int) -> Causes:
        answer = self._here.ask(partial(search, batches), self._cap)
        return Causes() if isinstance(answer, UserFailure) else answer

    # ---------------------------------------------------------------------------------------- the same run again

    def _repeated(self) -> tuple[Finding | None, bool]:
        """Run again: in the same process, in one with another hash seed, then with other states of its generators.
        Returns what differs, and whether disturbed runs can be compared.
        """
        for again, (seen, why, advice) in enumerate(_REPEATS):
            ambient = again == len(_REPEATS) - 1
            result = self._run(**self._base, elsewhere=again > 0, ambient=int(ambient))
            if result.failure is not None:
                return verdict.broken("repeated run", result.failure, f"the same run {seen}"), False
            number, got = verdict.difference(self._expected, result.batches), len(result.batches)
            fields = "all"
            if number is not None:
                fields = verdict.fields_of(self._expected[number], result.batches[number])
            elif (result.ended and got < len(self._expected)) or got > len(self._expected):
                number = min(got, len(self._expected))
            if number is not None:
                found = verdict.differs(number, fields, f"{seen}: {why}", advice)._replace(name="repeated run")
                if not ambient:
                    return found, False
                # Draws of concurrent samples also depend on timing.
                return self._ambient(found, number), not self._facts.asynchronous
        return None, True

    def _ambient(self, found: Finding, number: int) -> Finding:
        """Name the line for a difference that other states of the generators make."""
        self._depends = True
        state: verdict.State = "problem" if self._facts.seeded else "note"
        # Those of a blocking sample are seeded for it.
        draws = [each for each in self._search(number + 1).draws if not each.in_sample or self._facts.asynchronous]
        if draws:
            return verdict.drawn(draws, state, number, f"which nothing seeds there: {found.text.partition(':')[0]}")
        return found._replace(state=state)

    # -------------------------------------------------------------------------------------- disturbed runs

    def _disturbed(self, methods: Sequence[str]) -> Iterator[Finding]:
        facts = self._facts
        methods = [each for each in methods if each in multiprocessing.get_all_start_methods()]
        methods = ["threads"] if facts.threads else sorted(methods, key=lambda each: each != facts.method)
        drawn = list(disturbances(facts, methods, len(self._expected), self._seed))
        if self._depends:  # the epoch before would leave those generators in another state, as it does in training
            drawn = [each for each in drawn if each.kind not in ("again", "break")]
        same, found, problems = list[str](), set[object](), 0
        for made, each in enumerate(drawn):
            late = time.monotonic() > self._deadline and made >= _ALWAYS
            if late or problems >= _MOST_PROBLEMS:
                text = f"{made} of {len(drawn)} were made: {'the time is up' if late else 'enough was found'}"
                yield Finding("disturbed runs", "note", text, "give more --seconds for all" if late else "")
                break
            finding = self._differs(each)
            if finding is None:
                same.append(str(each))
            elif (cause := _cause(finding)) not in found:
                found.add(cause)
                problems += finding.state == "problem"
                yield finding
        if same and not problems:
            text = f"{len(same)} gave the same bytes: {'; '.join(same)}"
            yield Finding("disturbed runs", "ok", text, figures={"runs": same})

    def _differs(self, each: Disturbance) -> Finding | None:
        result = self._run(workers=each.workers, method=each.method, kind=each.kind, at=each.at)
        if result.failure is not None:
            return self._broken(result, each)
        number = verdict.difference(self._expected, result.batches)
        if number is not None:
            return self._other(number, result.batches[number], each)
        if result.state is not None:
            return self._resumed(each, result.state)
        return self._other_end(result, len(self._expected), each)

    def _other_end(self, result: RunResult, most: int, each: Disturbance) -> Finding | None:
        """Return a finding if a run whose batches are the expected ones has given fewer, or goes on behind them."""
        got = len(result.batches)
        if got > most:
            return verdict.goes_on(len(self._expected), str(each))
        if got == most:
            return None
        if result.ended:
            number = len(self._expected) - most + got
            return verdict.differs(number, "all", f"with {each}: the epoch ended before it")
        text = f"the run with {each} was cut off: {got} of {most} batches came in time"
        return Finding("disturbed run", "note", text, "give more --seconds")

    def _broken(self, result: RunResult, each: Disturbance) -> Finding:
        assert result.failure is not None
        found = verdict.broken("disturbed run", result.failure, f"the run with {each}")
        if result.failure.line is None and result.failure.error:  # draws that threads may not make are refused later
            return self._drawn_in_threads(len(result.batches), found, each) or found
        return found

    def _other(self, number: int, got: Batch, each: Disturbance) -> Finding:
        found = verdict.differs(number, verdict.fields_of(self._expected[number], got), f"with {each}")
        if each.kind in ("again", "break") and self._facts.sampler and not self._facts.seeded:
            # Where no seed says that an epoch can be read again, a sampler may count its epochs.
            advice = "let the order follow from a seed and the epoch's number, which the loader gives to set_epoch()"
            return found._replace(state="note", advice=advice)
        return self._drawn_in_threads(number, found, each) or found

    def _drawn_in_threads(self, number: int, found: Finding, each: Disturbance) -> Finding | None:
        draws = self._search(number + 1).draws if each.method == "threads" else []
        return verdict.drawn(draws, "problem", number, f"which all threads share: {found.text}") if draws else None

    def _resumed(self, each: Disturbance, state: bytes) -> Finding | None:
        left = len(self._expected) - each.at
        method = each.method if each.then else None
        rest = self._run(workers=each.then, method=method, state=state, batches=left + self._ends)
        if rest.failure is not None:
            return self._broken(rest, each)
        number = verdict.difference(self._expected, rest.batches, each.at)
        if number is None:
            return self._other_end(rest, left, each)
        got = rest.batches[number - each.at]
        if self._facts.iterable or self._facts.stateful:
            return verdict.not_resumed(each.at, number, verdict.fields_of(self._expected[number], got))
        return self._other(number, got, each)


def _cause(finding: Finding) -> object:
    """Return what findings of the same cause share."""
    return finding.name, finding.state, *(finding.figures.get(key) for key in ("error", "file", "line", "fields"))
