"""Map datasets over files of common formats."""
