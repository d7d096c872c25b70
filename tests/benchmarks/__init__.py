"""The benchmarks: every row is a ratio to torch's DataLoader, measured side by side in one run.

`python -m tests.benchmarks --help` says how to run them. The files, from the top down:

    run.py, __main__.py   the command: plans the rounds, prints the table, decides the exit code
    plan.py               the measurements, and the floor that each ratio must reach
    harness.py            starts each measurement in a fresh process, and samples its memory from outside
    child.py              the program of that process
    loaders.py, peers.py  the loaders compared: torch, ours, the others
    workloads.py          the datasets, and the checks on every batch that arrives
    report.py, chart.py   the table, the page and its picture
    against.py            this checkout's loaders against another checkout's, instead of torch's
    shared.py             the memory of a large list, a section of the page
    remote.py             reads from a store with a latency, another section; with the files remote_*.py
    inputs.py             photos, tokens, tables, texts and shards, with the files inputs_*.py
    gpu.py                the way to a CUDA device, a command and a section of its own; gpu_child.py measures
    sections.py           puts sections into the page
"""

from __future__ import annotations
