"""Typed configuration and declared inputs and outputs of every stage. No torch in here."""
