"""The control plane: reads the graph, submits, waits, publishes, tracks. Imports no torch.

docs/architecture.md has a table of its packages, in the order in which they may import each other.
"""
