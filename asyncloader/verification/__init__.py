"""`asyncloader verify`: runs a user's loader undisturbed and disturbed, and names what makes the batches differ."""
