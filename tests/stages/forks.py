"""Processes that are forked from one that has imported what they need (preloaded.py).

Each is a process of its own, and a rank has its own group; what Python or its libraries read when
they start is as in that one.
"""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.stages.preloaded"])
