"""A node of a service: a server, and the processes of its workers."""
