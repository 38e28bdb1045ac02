"""The control plane: reads the graph, submits, waits, publishes, tracks. Imports no torch."""
