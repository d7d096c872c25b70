"""Integrations with frameworks that replace a user's loader by their own.

    accelerate     `prepare`, `skip_first_batches`
    lightning      `LoaderCallback`
    pytest         the fixture `asyncloader_verify`
    ray            `RayWorkers`, `prepare_data_loader`
    transformers   `AsyncTrainerMixin`

Each module imports its framework, and is only imported when it is used. For code that accepts no loader class there is
`asyncloader.install`.
"""
