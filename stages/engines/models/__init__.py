"""Models in folders and in memory, and that the two are the same."""
