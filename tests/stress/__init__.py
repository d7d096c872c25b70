"""The chaos runner: what a loader gives while its workers die, hang and starve, held against what it should give.

`python -m tests.stress --help` says how to run it. One seed is one case: a workload, a loader and the faults that
strike it, all drawn from the seed. Each case runs in a process of its own, which the parent ends when its time is over.

    schedule.py, draw.py, scenarios.py   pure: what a case is; seed -> case
    faults.py              the faults themselves, in a worker or in the main process
    workloads.py           datasets and collations whose content is a function of the index
    consumer.py            reads a loader as the case says, and writes down what came
    checks.py              pure: what should have come, and where the two differ
    child.py               one case: an undisturbed run, the run, the comparison, the leak check
    runner.py              the processes of many cases
    plants.py              bugs to be planted, which the runner must find
    report.py              the page with the numbers of the last long run
"""

from __future__ import annotations
