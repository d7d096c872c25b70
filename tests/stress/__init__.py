"""The chaos runner: compares a loader's batches with the expected ones while its workers die, hang and starve.

`python -m tests.stress --help` says how to run it. One seed is one case: a workload, a loader and the faults that
strike it, all drawn from the seed. Each case runs in a process of its own, which the parent ends when its time is over.

    schedule.py, draw.py, scenarios.py   pure: the definition of a case; seed -> case
    faults.py              the faults themselves, in a worker or in the main process
    workloads.py           datasets and collations whose content is a function of the index
    consumer.py            reads a loader as the case says, and records batches and errors
    checks.py              pure: the expected batches, and the differences from the record
    child.py               one case: an undisturbed run, the run, the comparison, the leak check
    runner.py              the processes of many cases
    plants.py              bugs to be planted, which the runner must find
    report.py              the page with the numbers of the last long run
    interrupted.py, interrupted_cases.py   epochs in which one thing fails (`--interrupted`), with their own oracle
"""

from __future__ import annotations
