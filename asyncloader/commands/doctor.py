"""`asyncloader doctor`: tries what loaders need of this machine, and says what to do about what fails.

Data path: none. Each check does the thing itself: allocates shared memory, starts a worker of each kind, locks pages.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from asyncloader.base.cpus import affinity, cpu_quota, usable_cpus
from asyncloader.base.version import __version__
from asyncloader.errors import text_of
from asyncloader.verification.findings import Finding, in_bytes
from asyncloader.workers.ipc.segment import create, map_segment, memory_limit, reserve

_SEGMENT = 64 << 20
_LEAST_FILES = 256
_LEAST_MEMORY = 1 << 30
_EXTRAS = {
    "http": ("aiohttp", "yarl"),
    "hf": ("aiohttp", "yarl", "huggingface_hub"),
    "s3": ("obstore",),
    "parquet": ("pyarrow",),
    "litdata": ("litdata", "zstd"),
    "lance": ("lance", "pyarrow"),
    "shards": ("google_crc32c", *(("zstandard",) if sys.version_info < (3, 14) else ())),
    "service": ("msgspec",),
    "notebook": ("cloudpickle",),
    "ray": ("ray", "msgspec", "cloudpickle"),
    "top": ("rich",),
}


def examine() -> Iterator[Finding]:
    """Yield the findings, as they are made. Takes some seconds: a worker of each kind is started."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _versions, _processors, _memory, _shared_memory, _open_files, _start_methods, _devices, _extras
    ]  # fmt: skip
    for check in checks:
        yield from check()


def _versions() -> Iterator[Finding]:
    versions = {"asyncloader": __version__, "Python": platform.python_version(), "torch": str(torch.__version__)}
    versions["numpy"] = str(_version("numpy"))
    yield Finding("versions", "ok", ", ".join(f"{name} {each}" for name, each in versions.items()), figures=versions)
    if (uvloop := _version("uvloop")) is not None:
        yield Finding("event loop", "ok", f"uvloop {uvloop}")
    else:
        text = "asyncio's: uvloop, which is faster, is not installed"
        yield Finding("event loop", "note", text, "pip install uvloop")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processors() -> Iterator[Finding]:
    bound, quota, usable = affinity(), cpu_quota(), usable_cpus()
    text = f"{usable} may be used"
    if quota is not None and quota < bound:
        text += f": the control group's quota, though the machine shows {bound}"
    advice = "with a single processor, workers only help where samples wait for a disk or a network"
    figures = {"usable": usable, "bound": bound, "quota": quota}
    yield Finding("processors", "note" if usable == 1 else "ok", text, advice if usable == 1 else "", figures)


def _memory() -> Iterator[Finding]:
    limit, source = memory_limit()
    if limit is None:
        yield Finding("memory", "note", source)
        return
    low = limit < _LEAST_MEMORY
    text = f"{in_bytes(limit)} are left ({source})"
    advice = "end other programs, or raise the container's limit: a worker takes some 300 MiB for torch alone"
    yield Finding("memory", "problem" if low else "ok", text, advice if low else "", {"bytes": limit})


def _shared_memory() -> Iterator[Finding]:
    if sys.platform == "win32":
        yield Finding("shared memory", "note", "not used on Windows", 'use num_workers=0 or workers="threads"')
        return
    began = perf_counter()
    try:
        fd = create(_SEGMENT)
        try:
            reserve(fd, 0, _SEGMENT)
            memory = map_segment(fd, _SEGMENT)
        finally:
            os.close(fd)
        memory[:] = bytes(_SEGMENT)
    except (MemoryError, OSError) as error:
        advice = "give the machine, or the container, more memory; threads need none: workers='threads'"
        advice = "raise this limit" if "ulimit" in str(error) else advice
        yield Finding("shared memory", "problem", f"{in_bytes(_SEGMENT)} cannot be allocated: {error}", advice)
        return
    rate = _SEGMENT / (perf_counter() - began)
    kind = "without /dev/shm" if hasattr(os, "memfd_create") else "by shm_open"
    text = f"{in_bytes(_SEGMENT)} allocated and written at {in_bytes(rate)}/s, {kind}"
    yield Finding("shared memory", "ok", text, figures={"bytes_per_second": round(rate)})


def _open_files() -> Iterator[Finding]:
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _LEAST_FILES
    advice = f"ulimit -n {_LEAST_FILES}"
    if hard != resource.RLIM_INFINITY and hard < _LEAST_FILES:
        how = "raise it in /etc/security/limits.conf, or with docker run --ulimit nofile=4096"
        advice = f"the hard limit is {hard}: {how}"
    text = "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    yield Finding("open files", "problem" if few else "ok", text, advice if few else "", {"soft": soft, "hard": hard})


def _start_methods() -> Iterator[Finding]:
    """Start a worker of each kind, and wait for its batch."""
    if sys.platform == "win32":
        yield Finding("workers", "note", "processes need Linux or macOS", 'use num_workers=0 or workers="threads"')
        return
    from torch.utils.data import TensorDataset

    dataset = TensorDataset(torch.zeros(1, dtype=torch.float32, device="cpu"))
    default = torch.multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    works: list[str] = []
    failed: dict[str, str] = {}
    for method in multiprocessing.get_all_start_methods():
        took = _start(method, dataset)
        if isinstance(took, str):
            failed[method] = took
            continue
        works.append(method)
        text = f"the first batch took {1000 * took:.0f} ms{' (the default)' if method == default else ''}"
        figures = {"seconds": round(took, 4), "default": method == default}
        yield Finding(f"workers ({method})", "ok", text, figures=figures)
    advice = f"use multiprocessing_context={works[0]!r}" if works else "use workers='threads', or num_workers=0"
    for method, why in failed.items():
        yield Finding(f"workers ({method})", "problem", why, advice)


def _start(method: str, dataset: Any) -> float | str:
    """Return the seconds until a worker's first batch; or in words why none came."""
    from asyncloader.loaders.loader import DataLoader

    began = perf_counter()
    try:
        with DataLoader(dataset, num_workers=1, multiprocessing_context=method, timeout=60) as loader:
            next(iter(loader))
    except Exception as error:  # whatever a system without room for a process, a pipe or a file raises
        return f"{type(error).__name__}: {text_of(error)}"
    return perf_counter() - began


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda or torch.version.hip else ": this torch is built without it"
        yield Finding("CUDA", "note", f"not available{built}")
    else:
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        yield Finding("CUDA", "ok", ", ".join(names), figures={"devices": names})
        try:
            torch.empty(1 << 20, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            advice = "raise the limit of locked memory: ulimit -l unlimited"
            yield Finding("page locking", "problem", str(error), advice)
        else:
            yield Finding("page locking", "ok", "1 MiB locked")
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if nodes:
        yield Finding("NUMA nodes", "ok", f"{nodes}", figures={"nodes": nodes})


def _extras() -> Iterator[Finding]:
    there = [name for name, modules in _EXTRAS.items() if all(map(_is_there, modules))]
    missing = [name for name in _EXTRAS if name not in there]
    text = f"installed: {', '.join(there) or 'none'}"
    if missing:
        text += f"; not installed: {', '.join(missing)}"
    advice = f"for one: pip install 'asyncloader[{missing[0]}]'" if missing else ""
    advice += ", then pip install --no-deps litdata" if missing[:1] == ["litdata"] else ""
    yield Finding("extras", "note" if missing else "ok", text, advice, {"installed": there, "missing": missing})


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what the module is part of
        return False
