"""Many stages: `lockstep run`, chains, the Prefect flow, `record` and `status`.

One pipeline at a time in a clone.
"""
