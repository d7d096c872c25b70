"""Worker processes and the memory that they share with the main process.

Data path: scheduler -> [pool -> worker -> ring] -> reorder.
"""
