"""Lineage: what produced an artifact, what was produced from it, and why two of them differ.

Nothing is stored here: answers are a join of dvc.lock, its git history and the ledger.
"""
