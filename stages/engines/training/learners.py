"""Which learner a stage trains with: all in this process, or spread over the ranks."""

from typing import Any

from stages.context import Context
from stages.contracts.sharding import Sharding
from stages.engines.forward.ulysses import share_rows
from stages.engines.processes.ranks import Ranks
from stages.engines.training.learner import AnyLearner, Optimization
from stages.engines.training.optimizer import Learner


def open_learner(ctx: Context, ranks: Ranks, model: Any, how: Optimization) -> AnyLearner:
    """A learner of the model; all ranks call it."""
    share_rows(ctx, ranks, model)
    if ctx.sharding is Sharding.NONE:
        return Learner(model, how)
    # DeepSpeed is an extra, and slow to import.
    from stages.engines.training.zero import ZeroLearner

    return ZeroLearner(ctx, ranks, model, how)
