"""`lockstep selftest`: a job of its own that measures a cluster, and a judgement of what it found.

The job writes what it measured, rank by rank, and judges nothing; the judgement is a pure function
of these numbers. A check that dies or hangs costs only itself: each runs in a forked process.
"""
