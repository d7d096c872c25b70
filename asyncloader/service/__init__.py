"""The service: workers in other processes and on other machines, which any number of loaders share."""
