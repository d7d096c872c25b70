"""Ways to end a loader beside other processes, threads, exit hooks and finalizers.

Each script prints "True" for each condition that should hold. `provocations.py` runs them.
"""

from __future__ import annotations

TOGETHER: dict[str, str] = {
    "in a forked child, live at its exit": """
it = iter(DataLoader(data, num_workers=2))
first = int(next(it))
child = os.fork()
if child:
    print(os.waitpid(child, 0)[1] == 0)
    print([first, *map(int, it)] == list(range(200)))
else:
    own = iter(DataLoader(Data(), num_workers=2, persistent_workers=True))
    next(own)
    sys.exit(0)
""",
    "in a multiprocessing child, live at its exit": """
def train():
    global it
    loader = DataLoader(data, num_workers=2, persistent_workers=True)
    list(loader)
    it = iter(loader)
    next(it)
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
print(process.exitcode == 0)
""",
    "in a multiprocessing child, with an error": """
def train():
    it = iter(DataLoader(data, num_workers=2))
    next(it)
    sys.exit(4)
process = multiprocessing.get_context("fork").Process(target=train)
process.start()
process.join()
print(process.exitcode == 4)
""",
    "in a daemonic child": """
def train():
    try:
        list(DataLoader(data, num_workers=1))
    except AssertionError as error:
        sys.exit(5 if "daemonic processes are not allowed to have children" in str(error) else 6)
process = multiprocessing.get_context("fork").Process(target=train, daemon=True)
process.start()
process.join()
print(process.exitcode == 5)
""",
    "made in a thread, live at exit": """
local = threading.local()
def work():
    local.it = held["it"] = iter(DataLoader(data, num_workers=2, persistent_workers=True))
    next(local.it)
held = {}
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(int(next(held["it"])) == 1)
""",
    "SystemExit in a thread's loop": """
def work():
    for batch in DataLoader(data, num_workers=2):
        sys.exit(3)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(not children())
""",
    "a thread that outlives the main one": """
def work():
    threading.main_thread().join()
    print(sum(map(int, it)) == sum(range(1, 200)))
    print(len(list(DataLoader(data, num_workers=2, batch_size=50))) == 4)
    sys.stdout.flush()
it = iter(DataLoader(data, num_workers=2))
next(it)
threading.Thread(target=work).start()
""",
    "an exit hook that iterates": """
import atexit
def hook():
    print(len(list(DataLoader(data, num_workers=2, batch_size=50))) == 4)
    print(not children())
    sys.stdout.flush()
atexit.register(hook)
print(len(list(DataLoader(data, num_workers=1, batch_size=50))) == 4)
""",
    "an object that drops it in its finalizer": """
class Trainer:
    def __init__(self):
        self.loader = DataLoader(data, num_workers=2, persistent_workers=True)
        self.it = iter(self.loader)
        next(self.it)
    def __del__(self):
        self.it = self.loader = None
trainer = Trainer()
also = weakref.finalize(trainer.loader, print, True)
""",
    "hard exit": """
it = iter(DataLoader(data, num_workers=2))
next(it)
os._exit(0)
""",
    "replaced while iterating": """
loader = DataLoader(data, num_workers=2)
for step in range(3):
    for batch in loader:
        loader = DataLoader(data, num_workers=2)
        break
del batch
print(not children())
""",
    "shut down by its private method": """
it = iter(DataLoader(data, num_workers=2))
next(it)
workers = pids(it)
it._shutdown_workers()
print(gone(workers))
it._shutdown_workers()
del it
""",
    "recursion error in the body": """
def deep(it):
    next(it)
    deep(it)
it = iter(DataLoader(Data(), num_workers=2, batch_size=1, sampler=[0] * 100_000))
try:
    deep(it)
except RecursionError:
    print(True)
del it
print(not children())
""",
}
