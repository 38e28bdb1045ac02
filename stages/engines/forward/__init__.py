"""Sequences through a model, without padding, and what is read off them."""
