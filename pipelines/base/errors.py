"""Errors that a user can cause. They are caught at the edge and printed without a traceback."""


class LockstepError(Exception):
    """The message names the file, key or stage and says what to do."""
