"""Ways to drop a loader, to exit with it, and to fail with it, in one thread of one process.

Each script prints "True" for each condition that should hold. `provocations.py` runs them.
"""

from __future__ import annotations

ALONE: dict[str, str] = {
    "deleted mid-epoch": """
it = iter(DataLoader(data, num_workers=2))
next(it)
workers = pids(it)
del it
print(gone(workers))
""",
    "deleted before the first batch": """
it = iter(DataLoader(data, num_workers=2))
workers = pids(it)
del it
print(gone(workers))
""",
    "deleted without the collector": """
gc.disable()
for step in range(2):
    for batch in DataLoader(Data(), num_workers=2):
        break
    print(not children())
""",
    "persistent, deleted mid-epoch": """
loader = DataLoader(data, num_workers=2, persistent_workers=True)
it = iter(loader)
next(it)
workers = pids(it)
del it
print(not gone(workers))
del loader
print(gone(workers))
""",
    "persistent, deleted mid second epoch": """
loader = DataLoader(data, num_workers=2, persistent_workers=True)
list(loader)
it = iter(loader)
next(it)
workers = pids(it)
del it, loader
print(gone(workers))
""",
    "iterator in a reference cycle": """
gc.disable()
class Node: pass
node = Node()
node.me = node
node.it = iter(DataLoader(data, num_workers=2))
next(node.it)
workers = pids(node.it)
del node
gc.collect()
print(gone(workers))
""",
    "loader in a reference cycle": """
gc.disable()
loader = DataLoader(Data(), num_workers=2, persistent_workers=True)
loader.dataset.loader = loader
workers = pids(iter(loader))
next(loader._iterator)
del loader
gc.collect()
print(gone(workers))
""",
    "cycle collected by another thread": """
gc.disable()
node = [iter(DataLoader(data, num_workers=2))]
node.append(node)
next(node[0])
workers = pids(node[0])
del node
thread = threading.Thread(target=gc.collect)
thread.start()
thread.join()
print(gone(workers))
""",
    "cycle left to the exit": """
node = [iter(DataLoader(data, num_workers=2))]
node.append(node)
next(node[0])
del node
""",
    "held by an abandoned generator": """
def batches():
    for batch in DataLoader(data, num_workers=2):
        yield batch
generator = batches()
next(generator)
workers = children()
del generator
print(gone(workers))
""",
    "held by a generator at exit": """
def batches():
    try:
        yield from DataLoader(data, num_workers=2)
    finally:
        pass
generator = batches()
next(generator)
""",
    "dropped in another thread": """
held = [iter(DataLoader(data, num_workers=2))]
next(held[0])
workers = pids(held[0])
thread = threading.Thread(target=held.clear)
thread.start()
thread.join()
print(gone(workers))
""",
    "exit in a function": """
def main():
    it = iter(DataLoader(data, num_workers=2))
    next(it)
    sys.exit(0)
main()
""",
    "exit with a code in the loop": """
def main():
    for batch in DataLoader(data, num_workers=2, persistent_workers=True):
        sys.exit(7)
main()
""",
    "return from main": """
def main():
    loader = DataLoader(data, num_workers=2, persistent_workers=True)
    for batch in loader:
        return 0
sys.exit(main())
""",
    "exception in flight": """
def main():
    it = iter(DataLoader(data, num_workers=2))
    for batch in it:
        raise ValueError("of the body")
main()
""",
    "exception in flight, persistent": """
loader = DataLoader(data, num_workers=2, persistent_workers=True)
for batch in loader:
    raise ValueError("of the body")
""",
    "exception held at exit": """
def main():
    for batch in DataLoader(data, num_workers=2):
        raise ValueError("of the body")
try:
    main()
except ValueError as error:
    held = error
""",
    "error of a worker in flight": """
class Bad(Data):
    def __getitem__(self, index):
        if index == 5:
            raise ValueError("of the dataset")
        return index
def main():
    for batch in DataLoader(Bad(), num_workers=2):
        pass
main()
""",
    "error of a worker, forgotten": """
gc.disable()
class Bad(Data):
    def __getitem__(self, index):
        if index == 5:
            raise ValueError("of the dataset")
        return index
try:
    for batch in DataLoader(Bad(), num_workers=2):
        pass
except ValueError:
    pass
print(not children())
""",
    "interrupt in the body": """
def main():
    for batch in DataLoader(data, num_workers=2):
        raise KeyboardInterrupt
main()
""",
    "exception from a signal handler inside next": """
class Gated(Data):
    gate = multiprocessing.get_context("fork").Semaphore(0)
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index == 1:
            self.gate.acquire()
        return index
class Alarm(Exception): pass
def handler(*_):
    raise Alarm
signal.signal(signal.SIGALRM, handler)
it = iter(DataLoader(Gated(), num_workers=2))
print(int(next(it)) == 0)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    next(it)
except Alarm:
    print(True)
Gated.gate.release()
print([int(batch) for batch in it] == [1, 2, 3])
""",
    "worker killed, then iterated": """
it = iter(DataLoader(data, num_workers=2))
next(it)
os.kill(pids(it)[0], signal.SIGKILL)
try:
    for batch in it:
        pass
    print(False)
except RuntimeError as error:
    print("is killed by signal: Killed" in str(error))
del it
print(not children())
""",
    "worker killed, then dropped": """
it = iter(DataLoader(data, num_workers=2))
next(it)
workers = pids(it)
os.kill(workers[0], signal.SIGKILL)
del it
print(gone(workers))
""",
    "worker killed at exit": """
it = iter(DataLoader(data, num_workers=2))
next(it)
os.kill(pids(it)[1], signal.SIGKILL)
""",
    "all workers killed at exit, persistent": """
loader = DataLoader(data, num_workers=2, persistent_workers=True)
list(loader)
for pid in pids(loader._iterator):
    os.kill(pid, signal.SIGKILL)
""",
    "SystemExit in a dataset": """
class Exits(Data):
    def __getitem__(self, index):
        if index == 3:
            sys.exit(3)
        return index
try:
    list(DataLoader(Exits(), num_workers=2))
    print(False)
except RuntimeError as error:
    print("exited unexpectedly" in str(error))
print(not children())
""",
}
