"""The servers of `lockstep up` on this machine: MLflow's, Prefect's, and that of the pages.

Nobody without the clone's password, or the token of the pages, reads or starts anything.
"""
