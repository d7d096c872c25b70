"""The commands of `asyncloader` besides `serve`. What they find out is printed as lines or as JSON."""
