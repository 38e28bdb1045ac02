"""Rows as others write them, read into one shape."""
