"""The names of the figures that a loader's statistics have."""

from __future__ import annotations

FIGURES = frozenset(
    {
        "data/batches",
        "data/samples",
        "data/bytes",
        "data/wait_s",
        "data/wait_frac",
        "data/batches_per_sec",
        "data/samples_per_sec",
        "data/bytes_per_sec",
        "data/queue_depth",
        "data/ring_copies",
        "data/oversize_batches",
        "data/startup_s",
        "data/time_to_first_batch_s",
        "data/worker_busy_frac",
        "data/worker_restarts",
        "data/prefetch_depth",
        "data/num_workers",
        "data/worker_retirements",
        "data/skipped_samples",
        "data/refilled_samples",
        "device/page_locked_bytes",
        "device/page_lock_s",
        "device/staged_batches",
        "store/requests",
        "store/bytes",
        "store/retries",
        "store/resumed",
        "store/given_up",
        "store/retry_wait_s",
        "store/cache_hits",
        "store/cache_misses",
        "store/cache_bytes",
        "store/cache_evictions",
        "store/cache_damaged",
    }
)
