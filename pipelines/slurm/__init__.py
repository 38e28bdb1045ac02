"""The queue, job scripts, submission, what Slurm last said, how a job ended.

A job is known by its token; while Slurm is silent nothing has changed.
"""
