"""`dvc.yaml`, `dvc.lock` and DVC's cache: the graph, what is stale, repair after a kill.

DVC's files are changed with DVC's own locks in hand, or not at all.
"""
