"""The loaders' options: declared, checked, and resolved for an epoch."""
