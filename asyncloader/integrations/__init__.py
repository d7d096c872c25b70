"""Bridges to frameworks that replace a user's loader by one of their own making.

    accelerate     `prepare`, `skip_first_batches`
    lightning      `LoaderCallback`
    ray            `prepare_data_loader`
    transformers   `AsyncTrainerMixin`

Each module imports its framework; none is imported before it is asked for. Where no class can be given at all, there is
`asyncloader.install`.
"""
