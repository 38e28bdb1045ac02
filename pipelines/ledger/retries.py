"""Whether another try of a job may help with nothing changed: asked by whoever retries, and by
whoever tells people of failures once nobody does."""

from pipelines.ledger.entry import Attempt
from pipelines.ledger.state import State


def is_retryable(attempt: Attempt) -> bool:
    """Whether the job died, or says so itself, and nobody asked for its end."""
    if attempt.was_cancelled:
        return False
    if attempt.state() is State.DIED and not attempt.on_slurm:
        return True  # on Slurm, the driver itself tries again where that may help
    result = attempt.result
    return result is not None and result.retryable
