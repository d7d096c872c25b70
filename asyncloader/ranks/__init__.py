"""Agreement of several ranks on when an epoch ends."""
