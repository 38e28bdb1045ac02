"""What a self-test of a cluster measures with torch: rates, collectives, training, sampling.

Each function measures and returns plain numbers; none judges them (pipelines/selftest/judge.py
does). It is no stage: no map of `code/` holds it, and nothing here can make a stage run again.
"""
