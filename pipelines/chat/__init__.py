"""Finished policies that answer: which one is meant, its process, and a conversation in a terminal.

Nothing of a run is changed, and no torch is imported here: a policy answers in a process of the
compute plane, which ends with the process that started it. May import every room above it in the
table of docs/architecture.md.
"""
