"""Integrations with frameworks that replace a user's loader by their own, and with systems that show its statistics.

    accelerate     `prepare`, `skip_first_batches`, `log_stats`
    lightning      `LoaderCallback`
    opentelemetry  `instrument`
    prometheus     `LoaderCollector`, `dashboard`
    pytest         the fixture `asyncloader_verify`
    ray            `RayWorkers`, `prepare_data_loader`
    tensorboard    `log_stats`
    transformers   `AsyncTrainerMixin`

Each module imports its framework, and is only imported when it is used. For code that accepts no loader class there is
`asyncloader.install`.
"""
