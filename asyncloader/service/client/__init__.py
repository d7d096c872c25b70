"""The loader's side of a service."""
