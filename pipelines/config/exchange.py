"""A word to who would send a large policy from job to job by the disk.

Staged iterations write, hash and read a policy with its moments; fused steps (`rl.online`) keep it
in memory. By the estimate of docs/scaling.md, which a test compares, the former takes about half of
an iteration from a policy of LARGE weights on, and more with more nodes.
"""

from stages.contracts.params import Params
from stages.memory.shape import ModelShape

LARGE = 5_000_000_000
"""Weights from which on it is said."""


def advice_on_exchange(params: Params, policy: ModelShape | None) -> str | None:
    """What to say where `rl.iterations` has a large policy; None where nothing is."""
    if policy is None or policy.weights < LARGE or not params.rl.iterations:
        return None
    return (
        f"rl.iterations: a policy of {policy.weights / 1e9:.0f}B weights goes from job to job by "
        "the disk, which takes about half of an iteration, and more with more nodes; `rl.online` "
        "keeps it in memory (docs/scaling.md)"
    )
