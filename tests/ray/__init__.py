"""A loader's workers in a Ray cluster of three machines, which are processes of this one."""
