"""Environments that a policy acts in, turn after turn: tools and games."""
