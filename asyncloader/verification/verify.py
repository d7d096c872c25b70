"""Verifies a loader: an undisturbed run, disturbed runs, and experiments about each difference.

Data path: target -> [verify: interpreters, plan, verdict] -> findings. User code runs in child processes only.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Generator, Iterator
from typing import Any

from asyncloader.commands.findings import Finding
from asyncloader.verification import verdict
from asyncloader.verification.interpreter import OTHER_ORDER, Interpreter, ServerEnded
from asyncloader.verification.plan import Disturbance, LoaderFacts, disturbances
from asyncloader.verification.user_code import CodeLine

MOST_BATCHES = 24
_MOST_PROBLEMS = 3  # of disturbed runs, before the rest is left out
_MOST_SITES = 10
_MOST_S = 86_400
_LEAST_CAP_S = 30.0  # a busy machine takes its time
_ALWAYS = 4  # disturbed runs that are made even when the time is up: of different kinds, with forked workers


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
    with Interpreter(target, 1) as here, Interpreter(target, OTHER_ORDER) as elsewhere:
        yield from Verification(here, elsewhere, seed, seconds).findings()


def import_problem(interpreter: Interpreter, seconds: float) -> Finding | None:
    """Wait for the import of the module. Returns why it cannot be used; None: it can.

    Raises:
        ValueError: the function does not exist.
    """
    try:
        answer = interpreter.ready(seconds)
    except ServerEnded as error:
        text = f"importing the module ended its process, or took too long: {error}"
        return Finding("import", "problem", text, "a module must only define its functions when it is imported")
    if "refused" in answer:
        raise ValueError(answer["refused"])
    if "iterated" in answer:
        return verdict.at(
            "import", "problem", verdict.place(answer["iterated"]),
            "reads a loader while the module is imported, which every spawned worker does again",
            'put all but imports, classes and functions under `if __name__ == "__main__":`',
        )  # fmt: skip
    return verdict.broken("import", answer, "importing the module")


class Verification:
    """One verification. Interpreters may serve several, one after the other.

    Attributes:
        here: the interpreter of all runs but those in `elsewhere`, which has another hash seed and order of files.
    """

    def __init__(self, here: Interpreter, elsewhere: Interpreter, seed: int, seconds: float) -> None:
        self.here, self.elsewhere, self.seed = here, elsewhere, seed
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._cap = max(seconds, _LEAST_CAP_S)  # for one run
        self._facts: dict[str, Any] = {}
        self._expected: list[dict[str, Any]] = []
        self._base: dict[str, Any] = {}  # of the job of an undisturbed run
        self._ambient = False  # whether the batches depend on generators of the process that nothing seeds
        self._ends = False  # whether the epoch ends with the last of these; then a run reads on, for one more

    def findings(self) -> Iterator[Finding]:
        """Yield the findings."""
        ready = import_problem(self.here, self._cap)
        if ready is not None:
            yield ready
            return
        try:
            yield from self._verified()
        except ServerEnded as error:
            yield Finding("process", "problem", str(error), "the module's code ended its process, or holds it up")

    def _ask(self, job: dict[str, Any], interpreter: Interpreter | None = None) -> dict[str, Any]:
        answer = (interpreter or self.here).ask({"seconds": max(self._seconds / 6, 5.0), **job}, self._cap)
        if "refused" in answer:
            raise ValueError(answer["refused"])
        return answer

    def _run(self, interpreter: Interpreter | None = None, **job: Any) -> dict[str, Any]:
        most = (len(self._expected) or MOST_BATCHES) + self._ends
        # The number of batches bounds a run that is compared: it is not to be cut off while its workers are started.
        limit: dict[str, Any] = {"seconds": self._cap / 2} if self._expected else {}
        return self._ask({"do": "run", "batches": most, "ambient": 0, **limit, **job}, interpreter)

    @property
    def _time_is_up(self) -> bool:
        return time.monotonic() > self._deadline

    # ------------------------------------------------------------------------------------ the undisturbed run

    def _verified(self) -> Iterator[Finding]:
        self._facts = facts = self._ask({"do": "look", "ambient": 0})
        if failed := verdict.broken("make_loader", facts, doing := "making the loader"):
            yield self._located(failed, facts, doing)
            return
        mode = "seed= is set" if facts["seeded"] else "verified as with seed=0"
        kind = "iterable" if facts["iterable"] else "map"
        text = f"{facts['class']}, {kind} dataset, num_workers={facts['workers']}; {mode}; drawn by --seed {self.seed}"
        yield Finding("loader", "ok", text, figures={**facts, "seed": self.seed})
        workers = facts["workers"] if facts["iterable"] and facts["workers"] > 1 else 0
        self._base = {"workers": workers, "method": self._own_method if workers else None}
        result = self._run(**self._base, rows=True, batches=MOST_BATCHES + 1)
        if failed := verdict.broken("undisturbed run", result, doing := "the undisturbed run"):
            yield self._located(failed, result, doing)
            return
        # The batch behind the last that is compared says only that the epoch goes on.
        self._expected, self._ends = result["batches"][:MOST_BATCHES], bool(result.get("ended"))
        if not self._expected:
            yield Finding("undisturbed run", "problem", "the loader has no batch", "give it a dataset with samples")
            return
        yield Finding(
            "undisturbed run", "ok", f"{len(self._expected)} batches", figures={"batches": len(self._expected)}
        )
        yield from self._noticed(result)
        repeatable = True
        for finding, stops in self._repeated():
            yield finding
            repeatable = repeatable and not stops
        refused = yield from self._set_up()
        if self._shares and self._forks:
            text = "left out, as forked workers share what is named above"
            yield Finding("disturbed runs", "note", text, "mend what is above first")
        elif repeatable:
            yield from self._disturbed(refused)
        else:
            text = "left out, as two undisturbed runs differ already"
            yield Finding("disturbed runs", "note", text, "mend what is above first")

    @property
    def _own_method(self) -> str:
        return "threads" if self._facts["threads"] else "fork"

    @property
    def _forks(self) -> bool:
        return self._facts["workers"] > 0 and self._facts["method"] == "fork" and not self._facts["threads"]

    def _located(self, failed: Finding, result: dict[str, Any], doing: str) -> Finding:
        """Find the line that ended the process, if it was ended."""
        if "died" not in result:
            return failed
        answer = self._ask({"do": "last_line", "batches": MOST_BATCHES, "ambient": 0, **self._base})
        note = str(answer.get("note", ""))
        file, _, rest = note.rpartition("|")[0].partition("|") if note.count("|") == 2 else ("", "", "")
        if not file:
            return failed
        line = [file, int(rest), note.rpartition("|")[2]]
        return verdict.broken(failed.name, {**result, "line": line}, doing) or failed

    def _noticed(self, result: dict[str, Any]) -> Iterator[Finding]:
        if "alias" in result:
            number = result["alias"]
            lines = self._ask({"do": "aliasing", "at": number, "batches": MOST_BATCHES, "workers": 0}).get("lines", [])
            yield verdict.at(
                "aliased batches", "problem", verdict.place(lines[0]) if lines else None,
                f"changes batch {number} after it was delivered, while the next batch is made",
                "return new tensors from collate_fn and from samples, not a buffer that is used again", batch=number,
            )  # fmt: skip
        if "lengths" in result:
            before, after = result["lengths"]
            lines = self._ask({"do": "length", "batches": MOST_BATCHES, "workers": 0}).get("lines", [])
            yield verdict.at(
                "length", "problem", verdict.place(lines[0]) if lines else None,
                f"changes the dataset's length: {before} before the epoch, {after} after it",
                "a loader plans the epoch by the length, and each worker has a copy of the dataset",
            )  # fmt: skip
        first = self._expected[:2]
        if self._base["workers"] > 1 and len(first) == 2 and first[0]["leaves"] == first[1]["leaves"]:
            alone = self._run(workers=0)
            if verdict.difference(alone.get("batches", [])[:1], alone.get("batches", [])[1:2]) is not None:
                places = self._ask({"do": "kept", "at": 0, "workers": 0}).get("places", {})
                yield verdict.at(
                    "duplicates", "problem", verdict.place(places.get("dataset")),
                    f"gives the same samples in each of {self._base['workers']} workers",
                    "give each worker a part, by torch.utils.data.get_worker_info()",
                )  # fmt: skip

    # ---------------------------------------------------------------------------------------- run once more

    def _repeated(self) -> Iterator[tuple[Finding, bool]]:
        """Run in another interpreter, then with other seeds of the process's generators. Yields the findings, and
        whether disturbed runs cannot be compared.
        """
        if (failed := import_problem(self.elsewhere, self._cap)) is not None:
            yield failed, True
            return
        for ambient in (0, 1):
            result = self._run(self.elsewhere, **{**self._base, "ambient": ambient})
            if failed := verdict.broken("repeated run", result, "the same run in another process"):
                yield failed, True
                return
            number = verdict.difference(self._expected, result["batches"])
            got = len(result["batches"])
            if number is None and ((result.get("ended") and got < len(self._expected)) or got > len(self._expected)):
                number = min(got, len(self._expected))
            if number is not None:
                self._ambient = bool(ambient)
                yield self._why_another(number, ambient), not ambient or self._facts["asynchronous"]
                return
        yield (
            Finding(
                "repeated runs",
                "ok",
                "the same bytes with another hash seed, clock, order of files and state of generators",
            ),
            False,
        )

    def _why_another(self, number: int, ambient: int) -> Finding:
        job = {"do": "sites", "at": number, "batches": MOST_BATCHES, "workers": 0, "ambient": 0}
        other = {**job, "ambient": ambient}
        one = self._ask({**job, "thawed": [], "trace": True})
        two = self._ask({**other, "thawed": [], "trace": True}, self.elsewhere)
        if not ambient and one.get("leaves") == two.get("leaves"):
            for name, *where in one.get("sites", [])[:_MOST_SITES]:
                if self._ask({**job, "thawed": [[name, *where]]}).get("leaves") != one["leaves"]:
                    return verdict.entropy(name, CodeLine(*where), number)
        place = _parting(one, two)
        state: verdict.State = "problem" if not ambient or self._facts["seeded"] else "note"
        if ambient:
            why = "it draws from a generator of the process that nothing seeds, outside of a blocking sample"
            advice = "seed it where the loader is made, or give the sampler or dataset a generator with a seed: "
            return verdict.parts_ways(place, number, why, advice + verdict.OWN_GENERATOR, state)
        again = self._ask({**job, "thawed": []})
        if again.get("leaves") == one.get("leaves"):
            if (drawn := self._drawn_at_import(number)) is not None:
                return drawn
            why = (
                "this line has another effect in another process, as what follows from its hash seed has: hash() of a "
            )
            why += "string, the order of a set; or what it drew while the module was imported"
            asked = [f"{CodeLine(*where)} ({name})" for name, *where in one.get("imported", [])[:3]]
            why += f", at {', '.join(asked)}" if asked else ""
            advice = "sort a set before its order counts, take zlib.crc32() for hash(), and give generators a seed"
            return verdict.parts_ways(place, number, why, advice, state)
        why = "this line is the first with another effect"
        return verdict.parts_ways(place, number, why, verdict.OWN_GENERATOR, state)

    def _drawn_at_import(self, number: int) -> Finding | None:
        found = self._ask({"do": "drawn at import", "at": number, "workers": 0, "ambient": 0})
        if asked := found.get("asked"):
            return verdict.entropy(asked[0], CodeLine(*asked[1:]), number)
        line = verdict.place(found.get("line"))
        return None if line is None else verdict.drawn_at_import(line, number)

    # ------------------------------------------------------------------------------------------- the set-up

    def _set_up(self) -> Generator[Finding, None, bool]:
        """Look at the objects that the workers get. Returns whether it cannot be pickled."""
        facts = self._facts
        found = self._ask({"do": "setup", "batches": MOST_BATCHES, "workers": 0, "ambient": 0})
        for each in found.get("handles", []):
            yield verdict.handle(each, forks=self._forks)
        if found.get("seeds"):
            yield verdict.equal_seeds(found["seeds"], seeded=facts["seeded"] and not facts["asynchronous"])
        if refused := found.get("unpicklable"):
            needed = facts["workers"] > 0 and facts["method"] != "fork" and not facts["threads"]
            yield verdict.unpicklable(refused, needed=needed, method=facts["method"])
        self._shares = [each[0] for each in found.get("handles", [])]
        return bool(refused)

    # -------------------------------------------------------------------------------------- disturbed runs

    def _disturbed(self, refused: bool) -> Iterator[Finding]:
        facts = self._facts
        methods = ["fork"] if refused else ["fork", "spawn", "forkserver"]
        methods = [each for each in methods if each in multiprocessing.get_all_start_methods()]
        if facts["threads"]:
            methods = ["threads"]
        elif facts["method"] in methods:
            methods = sorted(methods, key=lambda each: each != facts["method"])
        plan = LoaderFacts(facts["iterable"], facts["workers"], methods, len(self._expected), facts["ranks"])
        made, same = 0, list[str]()
        causes: set[str] = set()
        noted: set[str] = set()
        # The epoch before would leave those generators in another state, as it does in training.
        left_out = {"again", "break"} if self._ambient else set[str]()
        drawn = [each for each in disturbances(plan, self.seed) if each.kind not in left_out]
        for each in drawn:
            late = self._time_is_up and made >= _ALWAYS
            if late or len(causes) >= _MOST_PROBLEMS:
                why = "the time is up" if late else "enough was found"
                text = f"{made} of {len(drawn)} were made: {why}"
                yield Finding("disturbed runs", "note", text, "give more --seconds for all" if late else "")
                break
            finding = self._differs(each)
            made += 1
            if finding is None:
                same.append(str(each))
            if finding is not None and (cause := _cause(finding)) not in causes:
                if finding.state == "problem":
                    causes.add(cause)
                elif cause in noted:
                    continue
                noted.add(cause)
                yield finding
        if same and not causes:
            yield Finding(
                "disturbed runs", "ok", f"{len(same)} gave the same bytes: {'; '.join(same)}", figures={"runs": same}
            )  # fmt: skip

    def _differs(self, each: Disturbance) -> Finding | None:
        job: dict[str, Any] = {"workers": each.workers, "method": each.method}
        match each.kind:
            case "resume":
                return self._resumed(each, job)
            case "ranks":
                return self._ranks(each, job)
            case _:
                pass
        job |= {"kind": each.kind, "at": each.at}
        result = self._run(**job)
        if failed := self._broken(result, each):
            return failed
        number = verdict.difference(self._expected, result["batches"])
        if number is None:
            return self._other_end(result, len(self._expected), each)
        return self._why_other(number, each, result["batches"][number])

    def _other_end(self, result: dict[str, Any], most: int, each: Disturbance) -> Finding | None:
        """Return a finding if a run whose batches are the expected ones has given fewer, or goes on behind them."""
        got = len(result["batches"])
        if got > most:
            return verdict.goes_on(len(self._expected), str(each))
        if got == most:
            return None
        if result.get("ended"):
            number = len(self._expected) - most + got
            return verdict.unexplained(number, f"{each}: the epoch ended before it", "all", [])
        text = f"the run with {each} was cut off: {got} of {most} batches came in time"
        return Finding("disturbed run", "note", text, "give more --seconds")

    def _broken(self, result: dict[str, Any], each: Disturbance) -> Finding | None:
        failed = verdict.broken("disturbed run", result, f"the run with {each}")
        if failed is not None and "error" in failed.figures and "line" not in failed.figures:
            # Draws that are refused there are refused behind the line that made them.
            failed = self._drawn_in_threads(len(result.get("batches", [])), each) or failed
        if failed is not None and self._shares:
            return failed._replace(advice=f"see the handles above: {', '.join(self._shares)}")
        return failed

    def _drawn_in_threads(self, number: int, each: Disturbance) -> Finding | None:
        if each.method != "threads":
            return None
        at = min(number, len(self._expected) - 1)
        found = self._ask({"do": "drawn in samples", "at": at, "workers": 0, "ambient": 0})
        line = verdict.place(found.get("line"))
        return None if line is None else verdict.drawn_in_threads(line, at, str(each))

    def _why_other(self, number: int, each: Disturbance, got: dict[str, Any]) -> Finding:
        part = verdict.part_of(self._expected[number], got)
        if self._facts["worker_init_fn"] and each.workers:
            without: dict[str, Any] = {"workers": each.workers, "method": each.method, "without_init": True}
            alone = self._run(**without).get("batches", [])
            if len(alone) > number and verdict.difference(self._expected, alone) is None:
                setup = self._ask({"do": "setup", "batches": MOST_BATCHES, "workers": 0, "ambient": 0})
                where = verdict.place(setup.get("init_place"))
                return verdict.at(
                    "worker_init_fn", "problem", where,
                    f"worker_init_fn changes the samples: batch {number} ({part}) is another one with {each}",
                    "leave out of it what samples depend on",
                )  # fmt: skip
        job = {"do": "state", "workers": 0, "ambient": 0, "batches": len(self._expected), "at": number}
        if each.kind in ("again", "break"):
            job |= {"passes": 2, "kind": each.kind, "batches": each.at if each.kind == "break" else len(self._expected)}
        elif not number:
            job["at"] = min(1, len(self._expected) - 1)
        moves_on = self._facts["iterable"] and "passes" not in job  # each stream keeps its position
        answer = {} if moves_on else self._ask(job)
        if answer.get("path"):
            found = verdict.kept_state(answer["path"], answer["lines"], number, str(each), part)
            # A sampler may count its epochs, where no seed says that an epoch can be read again.
            counts = answer["path"].startswith(("sampler", "batch_sampler")) and not self._facts["seeded"]
            return found._replace(state="note") if counts else found
        if (drawn := self._drawn_in_threads(number, each)) is not None:
            return drawn
        found = verdict.unexplained(number, str(each), part, [*self._shares, *answer.get("changed", [])])
        if "raised" in answer:
            found = found._replace(text=f"{found.text}. The search for its cause failed: {answer['raised']['text']}")
        return found

    def _resumed(self, each: Disturbance, job: dict[str, Any]) -> Finding | None:
        first = self._run(**job, until=each.at)
        failed = self._broken(first, each)
        if failed is not None:
            return failed
        number = verdict.difference(self._expected, first["batches"])
        if number is not None:
            return self._why_other(number, each, first["batches"][number])
        if "state" not in first:
            return self._other_end(first, len(self._expected), each)
        state, left = first["state"], len(self._expected) - each.at
        then: Any = {"workers": each.then, "method": each.method if each.then else None}
        rest = self._run(**then, state=state, batches=left + self._ends)
        places = self._ask({"do": "kept", "at": 0, "workers": 0, "ambient": 0}).get("places", {})
        if (error := rest.get("error")) and not rest["batches"] and error["type"] == "StateError":
            return verdict.not_resumed([], places, each.at, each.at, error["text"].splitlines()[-1])
        if failed := self._broken(rest, each):
            return failed
        number = verdict.difference(self._expected, rest["batches"], each.at)
        if number is None:
            return self._other_end(rest, left, each)
        if not self._facts["iterable"] and not self._facts["stateful"]:
            found = self._why_other(number, each, rest["batches"][number - each.at])
            if found.name != "bytes":
                return found
        one = self._ask({"do": "kept", "at": each.at + 1, "workers": 0, "ambient": 0}).get("kept", {})
        two = self._ask({"do": "kept", "at": 1, "workers": 0, "ambient": 0, "state": state}).get("kept", {})
        paths = [path for path in one if one[path] != two.get(path)]
        return verdict.not_resumed(paths, places, each.at, number)

    def _ranks(self, each: Disturbance, job: dict[str, Any]) -> Finding | None:
        shares: list[Any] = []
        for rank in range(2):
            result = self._run(**job, rank=rank, rows=True)
            if failed := self._broken(result, each):
                return failed
            shares.append(result["batches"])
        number = verdict.joined_difference(self._expected, shares)
        if number is None:
            longer = any(len(share) > len(self._expected) for share in shares)
            return verdict.goes_on(len(self._expected), str(each)) if longer else None
        found = self._why_other(number, each, self._expected[number])
        if found.name != "bytes":
            return found
        places = self._ask({"do": "kept", "at": 0, "workers": 0, "ambient": 0}).get("places", {})
        order = next((places[name] for name in ("sampler", "batch_sampler", "dataset") if name in places), None)
        return verdict.at(
            "ranks", "problem", verdict.place(order),
            f"gives ranks other samples than a single rank: at step {number} the joined batches of 2 are not its batch",
            "let all ranks draw the same order: from one seed and the epoch, not from the rank or the process",
            batch=number,
        )  # fmt: skip


def _cause(finding: Finding) -> str:
    """Return a text that findings of the same cause share: the kept value, the line, the error."""
    figures = finding.figures
    if "error" in figures:
        return f"{figures['error']} {figures.get('line')}"
    return f"{figures.get('path')} {finding.text.partition(':')[0].partition(' is another one with')[0]}"


def _parting(one: dict[str, Any], two: dict[str, Any]) -> CodeLine | None:
    from asyncloader.verification.watching import parting

    events = ([(str(a), int(b), str(c), str(d)) for a, b, c, d in each.get("events", [])] for each in (one, two))
    return parting(*events)
