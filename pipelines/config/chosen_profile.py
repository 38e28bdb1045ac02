"""Which profile a command uses. It imports nothing heavy: a stage's first process asks it."""

import os

PROFILE_VARIABLE = "LOCKSTEP_PROFILE"
DEFAULT_PROFILE = "local"


def profile_name(chosen: str | None = None) -> str:
    """The active profile: the one chosen, else the environment's, else `local`."""
    return chosen or os.environ.get(PROFILE_VARIABLE) or DEFAULT_PROFILE
