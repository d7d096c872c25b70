"""`asyncloader try`: runs a training program several times, unchanged, with torch's loader and with asyncloader's."""
