"""What made an artifact, what was made from it, and why two of them differ.

Nothing is stored here: an answer is a join of dvc.lock, its git history and the ledger.
"""
