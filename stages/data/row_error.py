"""What is wrong with a row of data."""


class RowError(ValueError):
    """To be said after the row's place, by whoever knows it."""
