"""How the main process and a worker talk: sockets, frames, and the end of either."""
