"""Ways to end a loader's life that a program may take, as scripts; see test_shutdown_provocations.py.

A driver imports torch once and runs each case in a forked child, at the child's global level, to the child's own normal
exit. It reports the exit code, the output, and whether a process was left behind.
"""

from __future__ import annotations

from tests.helpers.provocations_alone import ALONE
from tests.helpers.provocations_together import TOGETHER

DRIVER = """
import contextlib, ctypes, gc, json, multiprocessing, os, select, signal, sys, tempfile, threading, time, weakref
import torch
from {module} import DataLoader

PATIENCE_S = 30
CASES = {cases!r}
data = torch.arange(200)
multiprocessing.set_start_method("fork")  # also from Python 3.14 on: another would import this


class Data:
    def __len__(self):
        return 200
    def __getitem__(self, index):
        return index


def children():
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{{task}}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def pids(iterator):
    return [worker.pid for worker in iterator._workers]


def gone(workers):
    # reaped, too: a zombie still has its folder
    return len(workers) == 2 and not any(os.path.exists(f"/proc/{{pid}}") for pid in workers) and not children()


def wait(pid):
    fd = os.pidfd_open(pid)
    ended = bool(select.select([fd], [], [], PATIENCE_S)[0])
    os.close(fd)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    return ended, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def collect(pid, streams):
    ended, code = wait(pid)
    stayed = [orphan for orphan in children() if not wait(orphan)[0]]
    texts = []
    for stream in streams:
        stream.seek(0)
        texts.append(stream.read())
        stream.close()
    return dict(ended=ended, code=code, out=texts[0], err=texts[1], stayed=len(stayed))


ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become ours, so that we see whether they end
gc.collect()
gc.freeze()  # what the imports made need not be looked at when a child ends
results = {{}}
for name, body in CASES.items():
    streams = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if not child:
        for number, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), number)
            stream.close()
        break
    results[name] = collect(child, streams)
else:
    print(json.dumps(results))
    sys.exit()
del streams, stream, number, child, results, name
exec(compile(body, "case.py", "exec"))
"""

CASES: dict[str, str] = {**ALONE, **TOGETHER}

# torch's loader is not tested with these. Its behaviour depends on the moment at which its signal handler raises; when
# the collector finds its iterator, the wait for its workers fails, and after a hard exit they live for seconds; a child
# fails over the workers of its parent.
OURS_ONLY = {
    "worker killed, then iterated",
    "worker killed, then dropped",
    "worker killed at exit",
    "all workers killed at exit, persistent",
    "SystemExit in a dataset",
    "iterator in a reference cycle",
    "loader in a reference cycle",
    "cycle collected by another thread",
    "error of a worker, forgotten",
    "hard exit",
    "in a forked child, live at its exit",
}
