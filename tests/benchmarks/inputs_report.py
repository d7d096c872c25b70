"""From the measurements on inputs to their tables and their section of the page.

Data path: rounds -> [Markdown] -> docs/reference/benchmarks.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from .harness import Results
from .inputs_plan import ELASTIC, ROWS, STREAMS, VARIANTS, WORKERS
from .plan import FACADE, OURS, TORCH

TITLE = "## Inputs as people have them"


def table(name: str, results: Results) -> str:
    """A row's Markdown table. The last column names the fastest other loader, where it is faster."""
    row = ROWS[name]
    rate, stepped, fed = (f"{name}/{metric}" for metric in ("rate", "stepped", "fed"))
    limit = results.median(rate, row.limits[0])
    others = {loader: results.median(rate, loader) for loader in (TORCH, *row.peers) if results.has(rate, loader)}
    best = max(others, key=lambda loader: others[loader])
    lines = [
        f"| loader | samples/s | torch's x | of {row.limits[0]} | with a step: torch's x | step runs | |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    for loader in row.loaders:
        if not results.has(rate, loader):
            continue
        median = results.median(rate, loader)
        ratio, low, high = results.ratio(rate, loader, TORCH)
        beside = results.ratio(stepped, loader, TORCH)[0]
        ours = loader in (*OURS, *VARIANTS)
        cells = (
            f"`{loader}`" if ours else loader,
            f"{median:,.0f}",
            f"**{ratio:.2f}** ({low:.2f} to {high:.2f})" if ours else f"{ratio:.2f}",
            f"{median / limit:.0%}",
            f"**{beside:.2f}**" if ours else f"{beside:.2f}",
            f"{results.median(fed, loader):.0%}",
            f"behind {best}" if ours and others[best] > median else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"| {each} | {results.median(rate, each):,.0f} | | | | | |" for each in row.limits]
    if results.has(rate, ELASTIC):
        ratio, low, high = results.ratio(rate, ELASTIC, FACADE)
        lines += ["", f"`{ELASTIC}`: {ratio:.2f} ({low:.2f} to {high:.2f}) of `{FACADE}`."]
    return "\n".join(lines)


def section(measured: Mapping[str, tuple[Results, list[str]]], command: str) -> str:
    """The section of the page.

    Args:
        measured: of each row the rounds and the days of their measurement.
        command: that writes it.
    """
    parts = [TITLE, f"Written by `{command}`, on {len(os.sched_getaffinity(0))} cores. {ABOUT}"]
    for name, row in ROWS.items():
        if name in measured:
            results, dates = measured[name]
            rounds = len(results.values[f"{name}/rate", TORCH])
            said = f"`{name}`, interleaved rounds: {rounds}, measured on {' and '.join(dates)}."
            parts += [f"### {row.title[0].upper()}{row.title[1:]}", said, table(name, results)]
            if results.failures:
                failed = "\n".join(f"- {failure}" for failure in results.failures)
                parts.append(f"Measurements that failed, and were repeated:\n\n{failed}")
    return "\n\n".join([*parts, METHOD])


ABOUT = f"""\
{WORKERS} workers, persistent, after a warm-up epoch; \
medians of the rounds, and in brackets the ratios of single rounds. Rates hold for this machine only: main process, \
workers and store share its cores."""

METHOD = f"""\
- All loaders of an input read the same files, made from a seed, by the same code for a sample; random crops and windows
  follow from the sample's number. The checksum of the warm-up epoch, sample by sample, equals for every loader the one
  of the files read without a loader, and each later epoch is compared with the first.
- Bare code is {WORKERS} processes that do the work of their samples and nothing else: no batch leaves them. For tokens
  that is the copy of each window, as int64, into an array that is there; for Parquet the decoding of record batches
  and the arrays of columns; for shards reading them, four at a time, and decoding; for objects one event
  loop with aiohttp and 256 requests.
- *With a step*: the consumer waits after each batch for as long as torch takes for a batch without a step. *Step runs*
  is the share of the time in which it does so: 100% is a loader that no step waits for.
- Images are decoded by Pillow, whose decoder is libjpeg-turbo, and transformed in the steps of torchvision's
  transforms. torchvision itself cannot be imported beside a build of torch for CPUs.
- All but the streams of torch, webdataset and ours read an endless repetition of the epoch, so that no figure has the
  start of an epoch in it. Of streams, the epochs are some seconds long.
- For nodes, Grain and SPDL the element is the list of a batch's samples. SPDL has no worker processes but threads in
  the main process, as turboloader's `MapDataLoader`. Grain moves arrays, the others tensors.
- Shards are read by webdataset in torch's loader, by `RemoteIterableDataset` in ours, and by SPDL's asynchronous
  pipeline with aiohttp. Objects are read by torch with one blocking request at a time in each worker, by nodes with 256
  threads, by SPDL with 256 requests of aiohttp, and by an asynchronous dataset over
  `HttpTransport` in ours, with 256 requests in each worker, the default. Parquet is read row by row: by pyarrow in a
  dataset of torch's, by `RemoteIterableDataset` in
  ours.
- `streams={STREAMS}` is ours with an order that depends on no number of workers or ranks; with it comes a seed for each
  sample. `workers='threads'` is ours with {WORKERS} threads instead of processes.
- Not run: turboloader in rows whose batches it cannot give, those by length and of streams; and its own decoding of
  tar files, whose crops are others than the ones that all draw."""
