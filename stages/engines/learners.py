"""Which learner a stage trains with: all in this process, or spread over the ranks."""

from typing import Any

from stages.context import Context
from stages.contracts.sharding import Sharding
from stages.engines.learner import AnyLearner
from stages.engines.optimizer import Learner
from stages.engines.ranks import Ranks
from stages.engines.ulysses import share_rows


def open_learner(ctx: Context, ranks: Ranks, model: Any, **options: Any) -> AnyLearner:
    """A learner of the model with `Learner`'s options; all ranks call it."""
    share_rows(ctx, ranks, model)
    if ctx.sharding is Sharding.NONE:
        return Learner(model, **options)
    from stages.engines.zero import ZeroLearner  # DeepSpeed is an extra, and slow to import

    return ZeroLearner(ctx, ranks, model, **options)
