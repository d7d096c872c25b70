"""States of every kind that a public class saves, as earlier versions saved them, with the batches that came next.

A state that was saved loads for ever. Each folder named after a day has a file for each kind of loader:
`test_states.py` gives its states to new loaders, which must give the batches that are recorded beside them. A new kind
is recorded by

    python -m tests.states --write 2027-01-31

which writes all kinds to a new folder, and never overwrites a folder.

    kinds.py           what a kind is: how its loader is made, and run
    map_kinds.py, stream_kinds.py    the kinds
    parts.py           their datasets and samplers
    files.py           their shards and files
    data/              files of formats whose writers may change: made once, by the packages of 2026
    record.py          saves states, and loads them
"""
