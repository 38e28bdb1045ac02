"""Runs programs that nobody trusts: see docs/sandbox.md for what is promised and what is not."""
