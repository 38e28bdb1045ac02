"""MLflow's and Prefect's servers on this machine, with a password for each clone.

Nobody without the password reads or starts anything.
"""
