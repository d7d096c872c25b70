"""The commands of `asyncloader` besides `serve`. Their findings are printed as lines or as JSON."""
