"""A finished policy for others: a folder with a model card, and a version in a registry."""
