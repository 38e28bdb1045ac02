"""MLflow and OpenLineage, brought up to date from the ledger; warnings.

Shipping is idempotent, and never fails a run.
"""
