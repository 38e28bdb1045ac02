"""What every room stands on: errors, atomic files, locks, processes, the console, the repository.

Nothing here knows of stages, DVC or Slurm.
"""
